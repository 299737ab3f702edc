"""What `tools` and `tool_choice` of a request mean."""

from typing import Any

import pytest

from jaxpaged.core.errors import NotSupportedError, RequestError
from jaxpaged.server.protocol.chat_tools import ToolUse, choose_tools


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("a"), tool("b"), tool("c")]


def offered(use: ToolUse) -> list[str]:
    return [item["function"]["name"] for item in use.tools or ()]


@pytest.mark.parametrize("allowed", [[tool("c"), tool("a")], [{"type": "function", "name": "a"}, tool("c")]])
@pytest.mark.parametrize("nested", [True, False])
def test_allowed_tools_are_the_only_ones(allowed: list[Any], nested: bool) -> None:
    """In the form of OpenAI's chat completions, and in that of its responses."""
    def choose(mode: str) -> ToolUse:
        choice: dict[str, Any] = {"mode": mode, "tools": allowed}
        choice = {"type": "allowed_tools", **({"allowed_tools": choice} if nested else choice)}
        return choose_tools(TOOLS, choice, None, "hermes")

    auto, required = choose("auto"), choose("required")
    assert offered(auto) == offered(required) == ["a", "c"]
    assert auto.schema is None and auto.parse is not None
    assert required.schema is not None
    assert [item["properties"]["name"]["const"] for item in required.schema["items"]["anyOf"]] == ["a", "c"]


@pytest.mark.parametrize("allowed", [
    None, [], {}, {"mode": "auto"}, {"tools": [tool("a")]}, {"mode": "none", "tools": [tool("a")]},
    {"mode": "auto", "tools": []}, {"mode": "auto", "tools": "a"}, {"mode": "auto", "tools": ["a"]},
    {"mode": "auto", "tools": [tool("unheard_of")]}, {"mode": "auto", "tools": [{"type": "function"}]},
    {"mode": ["auto"], "tools": [tool("a")]},
])
def test_allowed_tools_that_mean_nothing_are_refused(allowed: Any) -> None:
    with pytest.raises(RequestError) as caught:
        choose_tools(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed}, None, "hermes")
    assert caught.value.param == "tool_choice"


def test_custom_tools_are_refused_by_name() -> None:
    custom = {"type": "custom", "custom": {"name": "a"}}
    for tools, choice, param in (([custom], None, "tools"), (TOOLS, custom, "tool_choice")):
        with pytest.raises(NotSupportedError, match="custom") as caught:
            choose_tools(tools, choice, None, "hermes")
        assert caught.value.param == param
