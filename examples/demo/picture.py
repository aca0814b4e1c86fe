"""A picture of one packed sequence: its documents, where ranks cut it, what each rank computes and receives."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

PADDING = "0.85"


def draw(path, lengths, rows, ranks, masks):
    figure, axes = pyplot.subplots(3, 1, figsize=(11, 7.5), height_ratios=[1, 2, 2], layout="constrained")
    draw_packing(axes[0], lengths, rows, ranks)
    draw_bars(axes[1], {mask.name: [work / 1e6 for work in mask.work] for mask in masks})
    axes[1].set(title="work of each rank and mask", ylabel="visible pairs (millions)")
    draw_bars(
        axes[2], {f"{mask.name}: {mask.path}": mask.received for mask in masks} | {"all-gather": masks[0].gathered}
    )
    axes[2].set(title="rows of K/V received by each rank in one forward", ylabel="rows")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_packing(axes, lengths, rows, ranks):
    colours = pyplot.get_cmap("tab20").colors
    begin = 0
    for index, length in enumerate(lengths):
        axes.barh(0, length, left=begin, color=colours[index % len(colours)], edgecolor="white", linewidth=0.5)
        begin += length
    axes.barh(0, rows - begin, left=begin, color=PADDING, hatch="//", edgecolor="white", label="padding")
    for rank in range(ranks):
        axes.axvline(rank * rows / ranks, color="black", linewidth=2)
        axes.text((rank + 0.5) * rows / ranks, 0.5, f"rank {rank}", ha="center", va="bottom")
    axes.axvline(rows, color="black", linewidth=2)
    axes.set(xlim=(0, rows), ylim=(-0.45, 0.75), yticks=[], xlabel="row")
    axes.set_title(f"{len(lengths)} documents, {begin} rows, and {rows - begin} rows of padding (hatched)")


def draw_bars(axes, series):
    width = 0.8 / len(series)
    for index, (label, values) in enumerate(series.items()):
        places = [rank + (index - (len(series) - 1) / 2) * width for rank in range(len(values))]
        bars = axes.bar(places, values, width, label=label)
        axes.bar_label(bars, fmt="%.4g", fontsize=8)
    axes.set_xticks(range(len(values)), [f"rank {rank}" for rank in range(len(values))])
    axes.margins(y=0.15)
    axes.legend(fontsize=8)
