"""Charts for the names of metrics."""

from agentfactory.viewer.charts import charts


def test_a_source_has_charts_with_its_held_out_tasks() -> None:
    names = ["success", "source/hunt/success", "eval/sampled/source/hunt/success", "source/hunt/groups"]
    names += ["source/hunt/trajectory/tool_calls", "eval/greedy/source/hunt/tool_calls", "sources/solved"]
    found = charts(names)
    (section,) = [section for section in found["sections"] if section["title"] == "Sources"]
    lines = {chart["key"]: [(line["kind"], line["name"]) for line in chart["lines"]] for chart in section["charts"]}
    assert lines == {
        "source/hunt/success": [("train", "source/hunt/success"), ("sampled", "eval/sampled/source/hunt/success")],
        "source/hunt/groups": [("train", "source/hunt/groups")],
        "sources/solved": [("train", "sources/solved")],
    }
    (other,) = found["others"]
    assert [line["kind"] for line in other["lines"]] == ["train", "greedy"]
