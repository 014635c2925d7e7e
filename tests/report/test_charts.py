"""What pictures show, read off their axes, and that they can be drawn."""

import pytest
from matplotlib.figure import Figure
from summaries import run_summary, sweep_summary, tune_summary

from specjax.report.charts import SCHEMES, charts, render


def drawn(summary, name):
    chart = next(chart for chart in charts(summary) if chart.name == name)
    axes = Figure().subplots()
    chart.draw(axes)
    return axes


def widths(axes):
    return [round(bar.get_width(), 6) for bar in axes.patches]


def heights(axes):
    return [round(bar.get_height(), 6) for bar in axes.patches]


def line(axes, index):
    return [list(map(float, values)) for values in axes.lines[index].get_data()]


def test_speedup_of_each_category():
    axes = drawn(run_summary(), "speedup")
    assert widths(axes) == [1.8, 1.0, round(18 / 14, 6)]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["qa", "math", "all"]
    assert "1.80" in [text.get_text() for text in axes.texts]
    assert any(list(line.get_xdata()) == [1, 1] for line in axes.lines)
    assert axes.get_xlim()[0] == 0


def test_acceptance():
    """A third of the steps each accepted 0, 2 and 3 tokens."""
    axes = drawn(run_summary(), "acceptance")
    assert heights(axes) == [pytest.approx(value, abs=1e-5) for value in (100 / 3, 0, 100 / 3, 100 / 3, 0)]
    assert [text.get_text() for text in axes.texts] == ["2", "0", "2", "2", "0"]


def test_positions():
    axes = drawn(run_summary(), "positions")
    assert heights(axes) == [100, 100, 50, 0, 100, 100, 50, 0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["unconditional", "conditional"]


def test_positions_without_data_have_no_bar():
    """The third position was never drafted, the fourth drafted and never kept."""
    summary = run_summary()
    summary["overall"]["speculative"] |= {
        "acceptance_rate_per_position": [1.0, 0.5, None, 0.0],
        "conditional_acceptance_rate": [1.0, 0.5, None, None],
    }
    axes = drawn(summary, "positions")
    assert heights(axes) == [100, 50, 0, 100, 50]
    assert [round(bar.get_x() + bar.get_width() / 2, 2) for bar in axes.patches] == [0.81, 1.81, 3.81, 1.19, 2.19]
    assert axes.get_xlim() == (0.5, 4.5)


def test_time_split():
    """Milliseconds a token: of 16 tokens, 2 s of prefill, 1.2 of drafting, 8.4 of verifying and .6 of others."""
    axes = drawn(run_summary(), "time")
    assert widths(axes) == [125, 125, 0, 75, 1000, 525, 50, 37.5]
    assert axes.get_xlabel() == "milliseconds per output token"


def test_measured_against_predicted():
    axes = drawn(run_summary(), "prediction")
    assert line(axes, 0) == [[pytest.approx(5 / 3)], [pytest.approx(8 / 7)]]
    assert {text.get_text() for text in axes.texts} == {"qa", "math"}
    assert axes.get_xlim() == axes.get_ylim()


def test_throughput_against_window_and_batch():
    """Solid lines are speculative, dashed ones of the same colour the plain rate: break-even."""
    axes = drawn(sweep_summary(), "window")
    assert line(axes, 0) == [[1, 4], [8 / 5, 8 / 10]]
    assert line(axes, 1) == [[1, 4], [pytest.approx(8 / 9)] * 2]
    assert axes.lines[0].get_color() == axes.lines[1].get_color() != axes.lines[2].get_color()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["B=1", "B=2", "plain (break-even)"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "4"]
    axes = drawn(sweep_summary(), "batch")
    assert line(axes, 2) == [[1, 2], [8 / 10, pytest.approx(8 / 12)]]
    assert "temperature" not in [chart.name for chart in charts(sweep_summary())]


def test_candidates():
    axes = drawn(tune_summary(speedup=1.8), "tune")
    assert line(axes, 0) == [[1, 4], [pytest.approx(5 / 3 / (1 / 3 + 4 / 3)), pytest.approx(1.818182)]]
    assert line(axes, 1) == [[4], [pytest.approx(1.8)]]


@pytest.mark.parametrize("build", [run_summary, sweep_summary, tune_summary])
def test_every_picture_can_be_drawn_and_says_what_was_simulated(build):
    names = [chart.name for chart in charts(build())]
    assert len(set(names)) == len(names)
    assert all("(simulated acceptance 0.8)" in chart.title for chart in charts(build() | {"synthetic_acceptance": 0.8}))
    for chart in charts(build()):
        assert b"simulated" not in chart.title.encode()
        assert render(chart, "dark", "png").startswith(b"\x89PNG")


def test_pictures_are_the_same_every_time_and_follow_the_scheme():
    chart = charts(run_summary())[0]
    light, dark = (render(chart, scheme, "svg").decode() for scheme in SCHEMES)
    assert light == render(chart, "light", "svg").decode()
    assert SCHEMES["light"][0] in light
    assert SCHEMES["dark"][0] in dark
    assert SCHEMES["light"][0] not in dark
