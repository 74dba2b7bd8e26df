"""Answers that must follow a JSON schema: reading the owner's schema, and checking an answer against it."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from coterie.problem_texts import ProblemText, name_json_error
from coterie.text import one_line

MAX_SCHEMA_BYTES = 100_000
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n```", re.S)


class WrongSchema(ValueError):
    """There is no usable JSON schema; the message says why and names the file."""

    def __init__(self, text: ProblemText) -> None:
        self.text = text
        super().__init__(text)


class WrongAnswer(ValueError):
    """The answer does not follow the schema; the message says where."""


def is_schema_text(value: str) -> bool:
    """True if the value of `answer_schema` is the schema itself, not the name of a file."""
    return value.lstrip().startswith("{")


def read_answer_schema(value: str, folder: Path) -> str:
    """Return the schema as compact JSON. `value`: the schema itself, or the name of a file in `folder`.

    `WrongSchema`, or `OSError` if the file cannot be read.
    """
    import jsonschema  # takes 0.1 s to import

    is_text = is_schema_text(value)
    name = ProblemText("the_schema") if is_text else value
    if (len(value) if is_text else (folder / value).stat().st_size) > MAX_SCHEMA_BYTES:
        raise WrongSchema(ProblemText("schema_too_large", name=name, most=f"{MAX_SCHEMA_BYTES:,}"))
    try:
        schema = json.loads(value if is_text else (folder / value).read_bytes())
    except json.JSONDecodeError as error:
        position = {"line": error.lineno, "column": error.colno, "character": error.pos}
        why = ProblemText("json_at", why=name_json_error(error), **position)
        raise WrongSchema(ProblemText("schema_not_json", name=name, why=why)) from None
    except ValueError as error:
        raise WrongSchema(ProblemText("schema_not_json", name=name, why=one_line(str(error)))) from None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise WrongSchema(ProblemText("schema_not_object", name=name))
    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise WrongSchema(ProblemText("schema_invalid", name=name, why=one_line(error.message))) from None
    return json.dumps(schema, ensure_ascii=False)


def check_answer(text: str, schema: str) -> str:
    """Return the JSON of an answer, without a code fence around it. `WrongAnswer` if it does not follow the schema."""
    fenced = _FENCE.fullmatch(text.strip())
    found = fenced[1] if fenced else text.strip()
    try:
        answer = json.loads(found)
    except (ValueError, RecursionError):
        raise WrongAnswer("it is no JSON") from None
    error = next(iter(_validator(schema).iter_errors(answer)), None)
    if error:
        raise WrongAnswer(f"{error.json_path}: {one_line(error.message, 200)}")
    return found


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    import jsonschema

    content = json.loads(schema)
    return jsonschema.validators.validator_for(content, jsonschema.Draft202012Validator)(content)
