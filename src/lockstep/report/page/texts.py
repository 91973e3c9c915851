"""Every text of the page, in English and in Chinese, and its colours, readable on white and on black."""

from typing import Final

TEXTS: Final = {
    "title": ("Report of a training run", "训练报告"),
    "title_many": ("Several training runs", "几次训练的比较"),
    "summary": ("Summary", "概要"),
    "run": ("run", "运行"),
    "state": ("state", "状态"),
    "progress": ("progress", "进度"),
    "results": ("last evaluation", "最近一次评估"),
    "digest": ("digest", "digest"),
    "started": ("started", "开始时间"),
    "workers": ("workers", "worker"),
    "speed": ("samples per second", "每秒样本数"),
    "command": ("command", "命令"),
    "curves": ("Curves", "曲线"),
    "curves_how": (
        "Drag to move, turn the wheel to zoom, double-click to see everything again.",
        "拖动平移，滚轮缩放，双击恢复。",
    ),
    "loss": ("loss", "损失"),
    "learning_rate": ("learning rate", "学习率"),
    "grad_norm": ("gradient norm", "梯度范数"),
    "memory": ("memory of each worker, in MiB", "每个 worker 的内存（MiB）"),
    "samples_per_second": ("samples per second", "每秒样本数"),
    "where": ("Where the time goes", "时间花在哪里"),
    "where_how": (
        "For each worker, over the steps that the recording still holds.",
        "每个 worker，范围是记录里还保留的那些步。",
    ),
    "loading": ("loading", "加载数据"),
    "compute": ("forward and backward", "前向与反向"),
    "gradients": ("rest of the gradients", "等待剩余梯度"),
    "others": ("waiting for the others", "等待其他 worker"),
    "update": ("update", "更新"),
    "evaluating": ("evaluation", "评估"),
    "saving": ("saving", "保存"),
    "rest": ("other", "其他"),
    "timeline": ("The last steps", "最后几步"),
    "timeline_how": (
        "Three rows for each worker: phases between steps, shards, and messages. Hover for details.",
        "每个 worker 三行：步与步之间、分片、通信。把鼠标放上去看细节。",
    ),
    "forecast": ("Other numbers of workers", "换一个 worker 数"),
    "forecast_how": (
        "How long a step would take, from what this run has measured. The range comes from the quartiles.",
        "根据这次运行的测量，一步会用多久。范围取自四分位数。",
    ),
    "forecast_best": (
        "This run had one worker, so the cost of exchanging gradients is not known: at best. A run on two tells.",
        "这次运行只有一个 worker，不知道交换梯度要多久：这是最好的情况。用两个 worker 短跑一次就知道。",
    ),
    "forecast_at_best": ("at best", "最好情况"),
    "forecast_most": (
        "On a CPU fewer workers share its caches and its memory, so each is quicker than it was here: at most.",
        "在 CPU 上 worker 少了，分享缓存和内存的也少了，每个都比这次快：这是最长时间。",
    ),
    "forecast_at_most": ("at most", "最长时间"),
    "forecast_cores": (
        "More workers than this machine has cores, and no GPU: they would wait for each other.",
        "worker 比这台机器的核还多，又没有 GPU：它们会互相等待。",
    ),
    "seconds_per_step": ("milliseconds per step", "每步毫秒数"),
    "speedup": ("relative to measured", "相对实测"),
    "measured": ("measured", "实测"),
    "changes": ("Workers that were lost, joined or left", "丢失、加入和离开的 worker"),
    "no_changes": ("None.", "没有。"),
    "when": ("epoch, step", "轮、步"),
    "lost": ("lost", "丢失"),
    "joined": ("joined", "加入"),
    "left": ("left", "离开"),
    "took": ("took", "用时"),
    "checkpoints": ("Checkpoints", "检查点"),
    "file": ("file", "文件"),
    "position": ("epochs and steps that are done", "已完成的轮数和步数"),
    "config": ("Config", "配置"),
    "config_differs": ("What differs", "不同之处"),
    "key": ("key", "键"),
    "keys": ("keys", "个键"),
    "fingerprint": ("fingerprint: all that the bits depend on", "指纹：结果的每一位所依赖的一切"),
    "environment": ("Environment", "环境"),
    "nothing_recorded": ("This run has no recording.", "这次运行没有记录。"),
    "few_steps": ("Too few steps were recorded.", "记录到的步太少。"),
    "made_by": ("made by Lockstep", "由 Lockstep 生成"),
}
"""By name: English, Chinese."""
RUN_COLOURS: Final = ("#4c78c8", "#e08a3c", "#4aa57a", "#b565b0", "#c8553d", "#3ea6b8", "#a58f2d", "#7b7fd4")
"""One for each run, or each curve of one run."""
SHARE_COLOURS: Final = {
    "loading": "#e08a3c",
    "compute": "#4c78c8",
    "gradients": "#b565b0",
    "others": "#c8553d",
    "update": "#4aa57a",
    "evaluating": "#3ea6b8",
    "saving": "#a58f2d",
    "rest": "#98a2ad",
}
"""Of each part of the time."""
AXIS_COLOUR: Final = "#87919c"
"""Of axes and labels."""
