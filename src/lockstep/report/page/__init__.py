"""`report.html`: one page about a run, or about several side by side, that needs no network.

    run_data     what a run directory says: metrics, config, starts, checkpoints, recording
    time_shares  where the time of each worker went, from its recording
    forecast     how long a step would take on another number of workers
    figures      curves, the timeline of the last steps, and bars, as figures of Bokeh
    texts        every text of the page in English and in Chinese
    document     the page

Bokeh is imported by `figures` and `document` alone, because its import takes long.
"""

from lockstep.report.page.document import write_page

__all__ = ["write_page"]
