"""A picture of a result file: every implementation's time over the floor, one panel for each op and number of heads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import by_workload

MARKERS = "osD^v<>PX*hd"
TICKS = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]


def check() -> None:
    """Raises ValueError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is missing; install it, or the package with its extra: pip install 'triton_mla[plot]'")


def panels(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Title -> workload (the floor's order within) -> implementation -> time over the floor."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["op"] + (f", {row['heads']} heads" if "heads" in row else ""), []).append(row)
    found = {}
    for title, group in grouped.items():
        times = {w: t for w, t in by_workload(group).items() if "floor" in t}
        ordered = sorted(times, key=lambda w: times[w]["floor"])
        found[title] = {w: {impl: us / times[w]["floor"] for impl, us in times[w].items()} for w in ordered}
    return {title: panel for title, panel in found.items() if panel}


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of a result file's rows.

    Raises:
        ValueError: no row has a floor to compare with, or the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter

    found = panels(content["rows"])
    if not found:
        raise ValueError("plot: the result file has no workload with a floor")
    names = list(dict.fromkeys(impl for panel in found.values() for times in panel.values() for impl in times if impl != "floor"))
    names.sort(key=lambda name: name != "triton_mla")
    widest = max(len(panel) for panel in found.values())
    figure = Figure(figsize=(max(6.0, 2.5 + 0.42 * widest), 0.8 + 3.9 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    drawn = {}
    for axis, (title, panel) in zip(axes, found.items(), strict=True):
        for i, name in enumerate(names):
            points = [(x, times[name]) for x, times in enumerate(panel.values()) if name in times]
            if points:
                # Workloads are no scale: a line would say that there is something between two of them. Ours has one, to be found.
                style = {"linewidth": 0.0, "markersize": 5, "color": f"C{i}", "alpha": 0.85}
                if name == "triton_mla":
                    style = {"linewidth": 1.0, "markersize": 5, "color": "black", "zorder": 3}
                (drawn[name],) = axis.plot(*zip(*points, strict=True), marker=MARKERS[i % len(MARKERS)], **style)
        drawn["floor"] = axis.axhline(1.0, color="grey", linestyle="--")
        axis.set(title=title, ylabel="time / floor", yscale="log")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(FixedLocator([tick for tick in TICKS if low <= tick <= high]))
        axis.yaxis.set_minor_locator(FixedLocator([]))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(range(len(panel)), [short(name, title) for name in panel], rotation=50, ha="right", rotation_mode="anchor", fontsize=8)
        axis.grid(axis="y", alpha=0.4)
        axis.grid(axis="x", alpha=0.15)
    header = content.get("header", {})
    figure.suptitle(f"{header.get('gpu', '')}, {header.get('date', '')}, bf16; lower is better".strip(", "))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=min(5, len(drawn)), fontsize=9)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise ValueError(f"plot={path}: it cannot be written: {error.strerror}") from None


def short(workload: str, title: str) -> str:
    """A workload's name without what the panel's title says."""
    return " ".join(word for word in workload.split() if word != title.split(",")[0] and not word.startswith("H="))
