"""The `@tool` decorator: schema, conversion of arguments, options and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.agent.tools import BadArguments, BadTool, InProcess, InThread, OnLoop, Tool, ToolContext, get_tool, tool
from tests.engines import Engine

if TYPE_CHECKING:
    from decimal import Decimal


@pytest.fixture
def engine() -> Engine:
    """Conversion of arguments does not depend on the engine: SQLite only."""
    return Engine()


@dataclass
class Stop:
    city: str
    zip: str | None = None


@dataclass
class Trip:
    stops: list[Stop]
    tags: dict[str, int] = field(default_factory=dict)


@dataclass
class Tree:
    branches: list[Tree]


@tool(effect="idempotent", seconds=2.5)
async def look_up(
    city: Annotated[str, "Where."],
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    near: Optional[list[Stop]] = None,  # noqa: UP045
    exact: bool = False,
    reach: float | None = None,
    *,
    ctx: ToolContext,
) -> dict[str, Any]:
    """Weather for a city.

    As the service sees it.

    Args:
        days (int): How many days,
            from today on.
        unit: The scale.

    Returns:
        What will be.
    """
    return {"city": city, "days": days, "unit": unit, "near": near, "agent": ctx.agent_id}


@tool
def plan(trip: Trip, title: str = "") -> str:
    """Plan a trip.

    :param trip: Where to go.
    :param str title: What to
        call it.
    """
    return f"{title}{len(trip.stops)}"


def made(function: object) -> Tool:
    found = get_tool(function)
    assert found is not None
    return found


def test_the_schema_of_the_parameters_follows_the_signature() -> None:
    stop = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "zip": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["city"],
    }
    assert made(look_up).spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "How many days, from today on.", "default": 1},
            "unit": {"enum": ["C", "F"], "description": "The scale.", "default": "C"},
            "near": {"type": "array", "items": stop},
            "exact": {"type": "boolean", "default": False},
            "reach": {"type": "number"},
        },
        "required": ["city"],
    }


def test_the_description_is_the_docstring_without_its_parameter_section() -> None:
    assert made(look_up).spec.description == "Weather for a city.\n\nAs the service sees it."
    assert made(plan).spec.description == "Plan a trip."
    properties = made(plan).spec.parameters["properties"]
    assert properties["trip"]["description"] == "Where to go."
    assert properties["title"]["description"] == "What to call it."


def test_text_after_the_parameter_section_belongs_to_the_description() -> None:
    @tool
    def measure(depth: int) -> None:
        """Measure.

        Args:
            depth: How deep.

        Only by day: not at night.
        """

    assert made(measure).spec.description == "Measure.\n\nOnly by day: not at night."
    assert made(measure).spec.parameters["properties"]["depth"]["description"] == "How deep."


def test_a_schema_has_no_references_and_no_titles() -> None:
    schema = made(plan).spec.parameters
    assert "$ref" not in msgspec.json.encode(schema).decode()
    assert schema["properties"]["trip"]["properties"]["stops"]["items"]["properties"]["city"] == {"type": "string"}
    assert "title" in schema["properties"] and "title" not in schema["properties"]["trip"]


def test_a_tool_is_unsafe_and_needs_no_approval_by_default() -> None:
    declared = made(plan)
    assert (declared.name, declared.effect, declared.approval, declared.deadline) == ("plan", "unsafe", False, None)
    assert isinstance(declared.run, InThread)


def test_the_options_of_the_decorator_apply_to_the_tool() -> None:
    @tool(name="send-off", effect="pure", approval=True, seconds=0.5)
    async def some_function() -> None: ...

    declared = made(some_function)
    assert (declared.name, declared.spec.name) == ("send-off", "send-off")
    assert (declared.effect, declared.approval, declared.deadline) == ("pure", True, timedelta(seconds=0.5))
    assert isinstance(declared.run, OnLoop)


def test_a_decorated_function_can_be_called_directly() -> None:
    assert plan(Trip(stops=[]), title="x") == "x0"
    assert get_tool(Trip) is None and get_tool(len) is None and get_tool("plan") is None


def test_a_process_tool_knows_its_module_and_name() -> None:
    run = made(in_process).run
    assert run == InProcess(module=__name__, file=__file__, name="in_process", memory_mb=64)


@tool(process=True, memory_mb=64)
def in_process() -> None: ...


def test_arguments_are_converted_to_the_annotated_types(ctx: ToolContext) -> None:
    accepted = made(plan).convert_arguments(
        {"trip": {"stops": [{"city": "Rome"}, {"city": "Bern", "zip": "3011"}]}}, ctx
    )
    assert accepted == {"trip": Trip(stops=[Stop("Rome"), Stop("Bern", "3011")])}


def test_the_context_is_passed_only_to_functions_with_that_parameter(ctx: ToolContext) -> None:
    assert made(look_up).convert_arguments({"city": "Rome"}, ctx) == {"city": "Rome", "ctx": ctx}
    assert "ctx" not in made(plan).convert_arguments({"trip": {"stops": []}}, ctx)


def test_a_model_cannot_pass_the_context(ctx: ToolContext) -> None:
    with pytest.raises(BadArguments, match="ctx: no such parameter"):
        made(look_up).convert_arguments({"city": "Rome", "ctx": {}}, ctx)


@pytest.mark.parametrize(("given_", "days"), [(3, 3), (3.0, 3), (None, None)])
def test_an_integer_may_be_written_as_float_and_null_means_the_default(
    ctx: ToolContext, given_: object, days: int | None
) -> None:
    assert made(look_up).convert_arguments({"city": "Rome", "days": given_}, ctx).get("days") == days


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "city: is missing"),
        ({"city": None}, "city: expected str, got null"),
        ({"city": "x", "days": "3"}, "days: expected int, got str"),
        ({"city": "x", "days": 3.5}, "days: expected int, got float"),
        ({"city": "x", "days": True}, "days: expected int, got bool"),
        ({"city": "x", "unit": "K"}, "unit: invalid enum value 'K' (one of: C, F)"),
        ({"city": "x", "near": [{"city": 7}]}, "near[0].city: expected str, got int"),
        ({"city": "x", "near": [{}]}, "near[0]: object missing required field city"),
        ({"city": "x", "dayz": 3}, "dayz: no such parameter, did you mean days? there are: city, days, unit, near"),
        ({"days": "x", "unit": 1}, "city: is missing; days: expected int, got str; unit: "),
    ],
)
def test_invalid_arguments_are_named_in_the_error(ctx: ToolContext, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArguments) as error:
        made(look_up).convert_arguments(arguments, ctx)
    assert message in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["city", "days", "unit", "near", "exact", "reach"]) | st.text(), json_values))
def test_any_arguments_are_accepted_or_refused_with_a_message(ctx: ToolContext, arguments: dict[str, Any]) -> None:
    try:
        accepted = made(look_up).convert_arguments(arguments, ctx)
    except BadArguments as error:
        assert str(error)
    else:
        assert isinstance(accepted["city"], str) and isinstance(accepted.get("days", 1), int)


def starred(*cities: str) -> None: ...
def double_starred(**cities: str) -> None: ...
def positional(city: str, /) -> None: ...
def bare(city) -> None: ...  # type: ignore[no-untyped-def]
def strange(city: Callable[[], int]) -> None: ...
def complicated(number: complex) -> None: ...
def renamed_context(context: ToolContext) -> None: ...
def taken_context(ctx: str) -> None: ...
def unresolved(price: Decimal) -> None: ...
def recursive(tree: Tree) -> None: ...
def yielding() -> Iterator[int]:
    yield 1


async def yielding_later() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (starred, r"\*cities.* has no schema: name every parameter"),
        (double_starred, r"\*\*cities.* has no schema"),
        (positional, 'take out the "/"'),
        (bare, 'parameter "city" needs a type, such as city: str'),
        (strange, 'parameter "city" has the type .*Callable.*, which JSON cannot represent'),
        (complicated, 'parameter "number" has the type complex'),
        (renamed_context, 'parameter "context" is a ToolContext: it must be called "ctx"'),
        (taken_context, 'parameter "ctx" is the ToolContext'),
        (unresolved, "annotations cannot be read: name 'Decimal' is not defined"),
        (recursive, "Tree contains itself"),
        (yielding, "return a list"),
        (yielding_later, "return a list"),
        (Stop, "decorates a function, got type"),
    ],
)
def test_a_function_that_cannot_be_a_tool_raises_with_the_reason(function: Callable[..., object], message: str) -> None:
    with pytest.raises(BadTool, match=message) as error:
        tool(function)
    assert str(error.value).startswith(f"tool {function.__name__}: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "look up"}, "a name is 1 to 64 of"),
        ({"name": ""}, "a name is 1 to 64 of"),
        ({"name": "x" * 65}, "a name is 1 to 64 of"),
        ({"effect": "harmless"}, "effect is pure, idempotent, unsafe, got 'harmless'"),
        ({"seconds": 0}, "seconds must be more than 0"),
        ({"seconds": float("nan")}, "seconds must be more than 0"),
        ({"memory_mb": 64}, "needs process=True"),
        ({"memory_mb": 0, "process": True}, "a number above 0"),
        ({"process": True}, "must be at the top level of its file"),
    ],
)
def test_invalid_options_raise_at_the_decorator(options: dict[str, Any], message: str) -> None:
    def local() -> None: ...

    with pytest.raises(BadTool, match=message):
        tool(**options)(local)
