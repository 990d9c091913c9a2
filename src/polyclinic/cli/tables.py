"""Results as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from polyclinic.json_types import JsonMapping
from polyclinic.messages import human_bytes
from polyclinic.runner.result_display import few_images, image_counts

if TYPE_CHECKING:
    from polyclinic.runner.result import Result


def print_result(result: Result, shown: Sequence[str] = ()) -> None:
    """The metrics of a run, pooled, as a mean over sites, and of each site: test images, or validation images only.

    Of warnings that were `shown` while it ran, it says only how many there are.
    """
    metrics, images = result.metrics, "test"
    if scored := metrics.get("validation"):
        metrics, images = {"test": scored["pooled"], **scored}, "validation"
    names = [name for name in metrics["test"] if name != "loss"]
    counts = image_counts(result.values, images)
    table = Table(title=f"{result['method']}, {images} images")
    table.add_column("")
    for name in ["images", *names]:
        table.add_column(name, justify="right")
    table.add_row("all sites together", _sum(counts), *_cells(metrics["test"], names))
    guessed = result.values.get("without_images")
    table.add_row("mean over sites", "", *_cells(metrics["mean"], names), end_section=not guessed)
    if guessed:
        table.add_row("a guess without images", "", *_cells(guessed, names), end_section=True)
    for site, own in metrics["per_site"].items():
        table.add_row(site, str(counts.get(site, "-")), *_cells(own, names))
    console = Console()
    console.print(table)
    if few := few_images(counts, list(metrics["per_site"])):
        console.print(f"note: {few}", highlight=False, soft_wrap=True)
    carried = human_bytes(result["communication"]["total_bytes"])
    selected = result["selected"]
    why = {"best": "the best on validation images", "last": "the last"}.get(selected["by"], selected["by"])
    console.print(
        f"model of round {selected['round']} ({why}); {carried} sent and received in all; folder: {result.folder}",
        soft_wrap=True,
    )
    if found := result.values.get("replay"):
        console.print(replay_sentence(found), soft_wrap=True)
    print_warnings(console, result.values.get("warnings", []), shown)
    if result["privacy"]:
        console.print(privacy_sentence(result["privacy"]), soft_wrap=True)


def print_warnings(console: Console, warnings: Sequence[str], shown: Sequence[str]) -> None:
    """Each warning that nobody saw yet, and how many others there are."""
    for sentence in warnings:
        if sentence not in shown:
            console.print(f"warning: {sentence}", style="yellow", highlight=False, soft_wrap=True)
    if above := sum(sentence in shown for sentence in warnings):
        words = "1 warning stands" if above == 1 else f"{above} warnings stand"
        console.print(f"{words} above the table, and in result.json", style="yellow", highlight=False, soft_wrap=True)


def replay_sentence(found: Mapping[str, float]) -> str:
    """How well images came back, how many codes they used, and what a probe could tell."""
    words = []
    if "psnr" in found:
        words.append(f"replayed images came back at {found['psnr']:.1f} dB")
    if used := {n.removeprefix("code_usage_"): v for n, v in found.items() if n.startswith("code_usage_")}:
        words.append(f"codes in use: {', '.join(f'{share:.0%} ({level})' for level, share in used.items())}")
    if "real_or_replayed_auc" in found:
        words.append(f"a probe tells real from replayed with an AUC of {found['real_or_replayed_auc']:.3f}")
    if "which_site_accuracy" in found:
        chance = f"{found['which_site_chance']:.0%} by chance"
        words.append(f"and which site made one in {found['which_site_accuracy']:.0%} of cases ({chance})")
    return "; ".join(words)


def privacy_sentence(privacy: JsonMapping) -> str:
    """What was spent at most, what that covers and what it does not."""
    return (
        f"epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:.3g} ({privacy['accountant'].upper()}) at site "
        f"'{privacy['site']}', the most of any; covers {', '.join(privacy['covers'])}; "
        f"does not cover {'; '.join(privacy['does_not_cover'])}"
    )


def _sum(counts: Mapping[str, int]) -> str:
    return str(sum(counts.values())) if counts else "-"


def _cells(metrics: JsonMapping, names: list[str]) -> list[str]:
    return [f"{metrics[name]:.3f}" if name in metrics else "-" for name in names]
