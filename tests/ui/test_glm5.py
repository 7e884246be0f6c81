"""Figures and applications of budget and reproduction: titles, errors in place, reset."""

from shadowkv_lab.glm5 import hypotheses, reported, verdict
from shadowkv_lab.provenance import recorded
from shadowkv_lab.steps.rest import Rest
from shadowkv_lab.ui import budget as budget_figures
from shadowkv_lab.ui import glm5 as figures

REST = Rest(20.0, experts=0)


def test_figures_are_finished_and_titled():
    table = verdict.verdict()
    shown = [
        figures.report_steps(),
        figures.tpot(table, REST),
        figures.layers_and_pool(),
        figures.speed_and_room(table),
        figures.rest_over_context(verdict.rest_over_context("rtx-pro-6000-server")),
        *budget_figures.budget_view(kv_gib=25.49).figures,
    ]
    for fig in shown:
        assert any(c.isdigit() for c in fig.layout.title.text)
        assert fig.layout.xaxis.title.text
        assert len(fig.data)
    assert "43.1 ms" in shown[0].layout.title.text
    assert "495,616 to 188,608" in shown[-1].layout.title.text, "in pages of 64"


def test_a_step_that_became_slower_is_explained_by_nothing():
    view = figures.reproduction_view(after_ms=120.0)
    assert "did not become faster" in view.note
    title = view.figures[1].layout.title.text
    assert "no hypothesis explains 120.0 ms" in title and "reach" not in title


def test_the_picture_of_the_families_holds_their_ends():
    """Its title's layers by hand: 25.49 GiB, and the 94.1 - 61 GiB that the weights leave."""

    def most(gib):
        tokens = [495_616 * 43.1 / 64.6 * 78 / (78 - n) for n in range(26)]
        sizes = [P * (78 * 708 + 1152 * n) / 2**30 for n, P in enumerate(tokens)]
        return max(n for n, size in enumerate(sizes) if size <= gib)

    assert (most(25.49), most(33.1)) == (12, 20)
    title = figures.layers_and_pool().layout.title.text
    assert "0 to 12 layers" in title and "to 20 beside the weights" in title


def test_a_typed_rest_and_its_growth_are_seen():
    typed = figures.reproduction_view(rest_ms=20.0, concurrency=32).table
    held = figures.reproduction_view(rest_ms=20.0, concurrency=32, rest_grows=False).table
    assert held.rest_ms.eq(20.0).all() and typed.rest_ms.gt(40.0).all()


def test_a_row_about_one_card_is_judged_on_that_card():
    table = hypotheses.recorded_hypotheses(reported.server()).copy()
    table["fits_server"] = False
    fits = figures.hypotheses_bars(table, reported.server()).data[0]
    assert fits.name.startswith("fits")
    assert list(fits.y) == [
        "the lab's vector cast on the workstation card",
        "a gather of static shape on the workstation card",
    ]


def test_a_tpot_is_as_sure_as_its_weakest_part():
    table = verdict.verdict().assign(provenance="recorded")
    seen = Rest(20.0, provenance=recorded())
    for rest, word in ((REST, "assumed"), (seen, "recorded")):
        labels = figures.tpot(table, rest).layout.annotations[: len(table)]
        assert all(label.text.endswith(f", {word}") for label in labels)
    assert str(REST.provenance) != "recorded"


def test_apps_show_errors_in_place_and_reset():
    app = budget_figures.budget_view.open()
    before = [fig.layout.title.text for fig in app.view.figures]
    app.controls["mem_fraction_static"].value = 1.5
    assert "OutOfRange" in app.error.value
    assert "above 0 and below 1" in app.error.value
    app.reset()
    assert app.error.value == ""
    assert [fig.layout.title.text for fig in app.view.figures] == before
    app.controls["log"].value = "nonsense\n"
    assert "BadFile" in app.error.value
    app.controls[
        "log"
    ].value = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, KV size: 10.00 GB\n"
    assert "10.00 GiB" in app.note.value
    assert "weights" in app.note.value
    assert "budget_app(" in app.code.value


def test_the_reproduction_app_takes_a_users_numbers():
    app = figures.reproduction_view.open()
    assert "43.1 ms (67%) are still there" in app.note.value
    app.controls["after_ms"].value = 84.85
    assert "10.8 of the cast" in app.note.value
    app.controls["before_ms"].value = 50.0
    assert "NoAnswer" in app.error.value
