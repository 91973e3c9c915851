"""An optimizer whose state is cut into parts, of which each worker holds some: `pieces` says which, `parts` moves them.

    forward, backward, reduction     as without it: gradients are whole on every worker
    update                           each worker updates the pieces of parameters that it holds, with their state
    gather                           each piece of the parameters goes from one worker that has updated it to the others

The state of ZeRO's first stage (Rajbhandari et al., "ZeRO", SC 2020), with two differences. The bits are those of the
whole optimizer, for pieces are cut only where the optimizer has shown that this changes none. And each piece is held,
and updated, by `neighbours` further workers, so no piece is lost with a worker.
"""
