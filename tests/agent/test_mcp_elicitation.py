"""Forms of MCP servers as questions to the person: fields, quick replies, answers that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
from mcp.types import ElicitRequestFormParams, ElicitRequestURLParams, ElicitResult

from coterie.agent.mcp_requests import answer_elicitation


class Person:
    def __init__(self, *answers: str | None) -> None:
        self.answers, self.asked = list(answers), list[tuple[str, list[str]]]()

    async def __call__(self, text: str, quick_replies: list[str]) -> str | None:
        self.asked.append((text, quick_replies))
        return self.answers.pop(0)


async def fill(person: Person, required: list[str] | None = None, **fields: Any) -> ElicitResult:
    schema = {"type": "object", "properties": fields, "required": list(fields) if required is None else required}
    params = ElicitRequestFormParams(message="Well?", requested_schema=schema)
    return await answer_elicitation(params, server="shop", ask=person)


@pytest.mark.parametrize(
    ("field", "buttons", "said", "value"),
    [
        ({"type": "boolean"}, ["Yes", "No", "Decline"], "yes", True),
        ({"type": "string", "enum": ["a", "b"]}, ["a", "b", "Decline"], "B", "b"),
        ({"type": "string", "enum": ["a"], "enumNames": ["Apple"]}, ["Apple", "Decline"], "apple", "a"),
        ({"type": "string", "oneOf": [{"const": "a", "title": "Apple"}]}, ["Apple", "Decline"], "Apple", "a"),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, ["Decline"], "a, b", ["a", "b"]),
        ({"type": "integer"}, ["Decline"], " 3 ", 3),
        ({"type": "number"}, ["Decline"], "2.5", 2.5),
        ({"type": "string"}, ["Decline"], "free text", "free text"),
        ({"type": "string", "enum": [str(n) for n in range(12)]}, ["Decline"], "11", "11"),
        ({"type": "string", "enum": ["", "a"]}, ["Decline"], "a", "a"),
    ],
)
async def test_a_field_is_one_question(field: dict[str, Any], buttons: list[str], said: str, value: object) -> None:
    person = Person(said)
    answer = await fill(person, one=field)
    assert (answer.action, answer.content) == ("accept", {"one": value})
    [(text, offered)] = person.asked
    assert offered == buttons and text.startswith("The tool server shop asks: Well?\n")


async def test_an_answer_that_does_not_fit_is_asked_again_three_times() -> None:
    person = Person("many", "11", "three")
    assert (await fill(person, count={"type": "integer", "maximum": 9})).action == "cancel"
    assert "expected a whole number" in person.asked[1][0] and "to 9" in person.asked[2][0]


@pytest.mark.parametrize("said", ["inf", "-Infinity", "nan", "1e999"])
async def test_what_json_cannot_represent_is_no_number(said: str) -> None:
    person = Person(said, "2")
    assert (await fill(person, price={"type": "number"})).content == {"price": 2.0}
    assert "expected a number." in person.asked[1][0]


async def test_a_whole_number_may_be_larger_than_any_decimal_number() -> None:
    said = "1" + "0" * 400
    assert (await fill(Person(said), count={"type": "integer"})).content == {"count": 10**400}
    person = Person(said, "3")
    assert (await fill(person, count={"type": "integer", "maximum": 9})).content == {"count": 3}
    assert "to 9" in person.asked[1][0]


async def test_a_choice_of_several_values_names_them() -> None:
    person = Person("red, Blue")
    answer = await fill(person, colours={"type": "array", "items": {"enum": ["red", "green", "blue"]}})
    assert answer.content == {"colours": ["red", "blue"]}
    assert "Any of these, separated by commas: red, green, blue" in person.asked[0][0]


async def test_a_long_choice_can_be_chosen_by_its_shortened_button() -> None:
    title = f"Deliver it{' as soon as it is possible' * 8}\nto the neighbour"

    class Presser(Person):
        async def __call__(self, text: str, quick_replies: list[str]) -> str | None:
            await super().__call__(text, quick_replies)
            return quick_replies[0]

    answer = await fill(Presser(*[None] * 3), how={"type": "string", "oneOf": [{"const": "later", "title": title}]})
    assert answer.content == {"how": "later"}


async def test_an_optional_field_can_be_skipped() -> None:
    person = Person("Ada", "Skip")
    answer = await fill(person, ["name"], name={"type": "string"}, note={"type": "string"})
    assert answer.content == {"name": "Ada"} and person.asked[1][1] == ["Skip", "Decline"]


@pytest.mark.parametrize(("said", "action"), [("Decline", "decline"), ("decline", "decline"), (None, "cancel")])
async def test_a_question_can_be_declined_or_stay_without_an_answer(said: str | None, action: str) -> None:
    assert (await fill(Person(said), one={"type": "string"})).action == action


async def test_a_form_without_fields_asks_for_consent() -> None:
    person = Person("Accept")
    assert (await fill(person)).action == "accept" and person.asked[0][1] == ["Accept", "Decline"]


async def test_an_address_is_shown_with_a_warning() -> None:
    params = ElicitRequestURLParams(message="Log in", url="http://127.0.0.1/login", elicitation_id="1")
    person = Person("Done")
    assert (await answer_elicitation(params, server="shop", ask=person)).action == "accept"
    assert "only if you trust it: http://127.0.0.1/login" in person.asked[0][0]
