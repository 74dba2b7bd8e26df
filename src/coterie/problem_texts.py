"""What can be wrong with a setting: a code and values, and the English sentence that they make.

A value can be such a text itself, or a tuple of them.

Pages have sentences of their own for the codes: `config_<code>` in `web/static/words/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

SENTENCES: Mapping[str, str] = {
    # Wrong values. These codes and sentences begin with "expected": the value is skipped.
    "expected_string": "expected a string",
    "expected_text": "expected a non-empty string",
    "expected_short_string": "expected a string of at most {most} characters",
    "expected_line": "expected at most {most} characters on one line",
    "expected_boolean": "expected true or false",
    "expected_integer": "expected a whole number, {least} or more",
    "expected_integer_between": "expected a whole number, {least} to {most}",
    "expected_integer_least": "expected a whole number of at least {least}",
    "expected_number": "expected a number, 0 to {most}",
    "expected_choice": "expected {choices}",
    "expected_array": "expected an array",
    "expected_object": "expected an object",
    "expected_table": "expected a table",
    "expected_table_of": "expected a table [{path}]",
    "expected_tables": "expected tables such as [{path}.name]",
    "expected_strings": "expected a list of strings",
    "expected_string_table": "expected a table of strings",
    "expected_networks": 'expected a list of addresses or networks such as "127.0.0.1" or "10.0.0.0/8"',
    "expected_addresses": 'expected a list of addresses such as "https://example.org/hooks"',
    "expected_card": 'expected the address of an agent card such as "https://example.org/.well-known/agent-card.json"',
    "expected_mcp_url": 'expected an address such as "https://example.org/mcp"',
    "expected_some_card": "expected the address of its agent card",
    "expected_store": 'expected "sqlite" or "postgresql://user@host/name"',
    "expected_public_url": 'expected an address such as "https://coterie.example"',
    "expected_command_or_url": "expected a command or a url, got neither",
    "expected_command_or_url_only": "expected a command or a url, got both",
    "expected_effort": "expected a word such as none, minimal, low, medium, high",
    "expected_no_key": 'expected no "{key}", which the runtime sets itself',
    "expected_json_values": "expected only values that JSON has",
    "expected_url": "expected an address such as http://127.0.0.1:1234/v1",
    "expected_plain_url": 'expected an address without user name, password or query; put the key into "apiKey"',
    "expected_reference": 'expected a reference such as "${{MAIN_API_KEY}}"',
    "expected_headers": "expected an object of header names and values",
    "expected_header": "expected the name of an HTTP header that the runtime does not set itself",
    "expected_header_value": 'expected a string, with references such as "${{TEAM_TOKEN}}" for secrets',
    "expected_capability": "expected a lower-case name without spaces",
    "expected_price": "expected the price of a million tokens, a number from 0",
    "expected_currency": 'expected three capital letters such as "USD"',
    "expected_same_currency": 'expected "{currency}", the currency of service "{service}", got "{given}": all prices'
    " must have one currency; until then the cost of this service is unknown",
    "expected_secrets": 'expected an object such as {{"NAME": "key"}}',
    # Files
    "not_utf8": "is not UTF-8 text",
    "not_utf8_at": "is not UTF-8 text (byte {byte})",
    "repair_object": "expected an object: repair the file first",
    "repair_array": "expected an array: repair the file first",
    "not_json": "is no JSON: {why}",
    "unreadable": "cannot be read: {why}",
    "unreadable_number": "holds a number that cannot be read: {why}",
    "unreadable_file": "{name} cannot be read: {why}",
    "not_utf8_in_line": "line {line} column {column}: is not UTF-8 text",
    "not_json_in_line": "line {line} column {column}: is no JSON: {why}",
    "missing_file": "there is no file '{name}' in the folder",
    "too_large": "more than {most} bytes; not read",
    "too_deep": "is nested too deeply",
    "secrets_not_json": "is no JSON; delete it and enter the keys again",
    "secrets_readable": "others can read it; run: chmod 600 {name}",
    "schema_too_large": "{name} has more than {most} bytes",
    "schema_not_json": "{name} is no JSON: {why}",
    "schema_not_object": '{name} expected a JSON schema with "type": "object"',
    "schema_invalid": "{name} is no JSON schema: {why}",
    # Names
    "unknown_key": "unknown key",
    "unknown_field": "is not known",
    "unknown_agent": "there is no agent '{name}'",
    "unknown_service": 'there is no service "{name}"',
    "unknown_service_of_agent": 'there is no service "{name}" in llmservices.json',
    "reserved_id": 'the id "{name}" is taken: choose another',
    "wrong_id": "an id is 1 to 64 of a-z, 0-9, _ and -, beginning with a letter or digit",
    "taken_id": "there is an agent with this id: choose another",
    "repeated_id": '"{name}" is the id of {where} already; the first one counts',
    "own_fallback": "a service cannot be its own fallback",
    "custom_capability": '"{name}" is treated as a custom type',
    "below_itself": "an agent cannot be below itself",
    # Keys of services
    "missing_key": "{name} is set neither in the environment nor in data/secrets.json",
    "broken_key": "the key in {name} contains invalid characters; copy it again",
    "broken_header": "the value contains characters that an HTTP header cannot have",
    "headers_without_url": "only a server with a url has headers: use env",
    "headers_elsewhere": "they hold a key for another address; enter them again, or null to remove them",
    "key_elsewhere": "it was entered for another address; enter the key again, or an empty one if none is needed",
    "key_written_out": "holds a key, and keys do not go to the database: write its name, as in ${{MAIN_API_KEY}}, and"
    " put the key into the environment of each process",
    # State of the society
    "next_start": "the change takes effect at the next start",
    "edited_by_hand": "agents and limits are changed by editing this file",
    "agents_not_editable": "the agents are written in a way that a program cannot change: give each"
    " a table [agents.name]",
    "agent_terminated": "was terminated and stays so: remove it from the file, or use another id for a new agent",
    "agent_not_described": "is no longer described: it keeps its mail and answers when it is put back; to end it,"
    " terminate it",
    "files_differ": "the database has another configuration (version {version}), which counts ({found}): look at all"
    " differences with coterie apply --dry-run, and make these files count with coterie apply",
    # Tools
    "tool_is_built_in": "the tool {name} is left out: a built-in tool has that name",
    "tool_is_in": "the tool {name} is left out: {where} has one of that name",
    "tool_exists": "the tool {name} is left out: there is one of that name",
    "not_loaded": "cannot be loaded: {why}",
    "not_loaded_in_line": "line {line}: cannot be loaded: {why}",
    "mcp_unavailable": "the MCP server {name} cannot be reached: {why}",
    "mcp_not_connected": "the MCP server {name} is not connected ({why}); next try in {seconds} s",
    # Parts of other sentences
    "got_nothing": "nothing",
    "got_object": "an object",
    "got_array": "an array",
    "got_large_number": "a number too large",
    "got_table": "a table",
    "got_list": "a list",
    "either": "{first} or {second}",
    "the_schema": "the schema",
    "no_constant": "{name} is no JSON",
    "json_value": "Expecting value",
    "json_name": "Expecting property name enclosed in double quotes",
    "json_colon": "Expecting ':' delimiter",
    "json_comma": "Expecting ',' delimiter",
    "json_comma_in_object": "Illegal trailing comma before end of object",
    "json_comma_in_array": "Illegal trailing comma before end of array",
    "json_extra": "Extra data",
    "json_open_string": "Unterminated string starting at",
    "json_control_character": "Invalid control character at",
    "json_at": "{why}: line {line} column {column} (char {character})",
    "only_in_files": "{path}: only in the files{value}",
    "only_in_database": "{path}: only in the database{value}",
    "differs": "{path}: {before} in the database, {after} in the files",
    "one_text": "one text",
    "another_text": "another",
    "another_order": "services: another order; agents without a service use the first",
    "and_more": "{found} and {n} more",
    "unset_reference": "{name}, which {where} refers to, is set neither in the environment nor in data/secrets.json",
    "no_tools_listed": "it did not list its tools within {seconds} s",
    "no_command_or_url": "the entry names neither a command nor a url",
    "http_status": "HTTP {status}: {why}",
    "last_written": "{why}; the last it wrote was: {wrote}",
}
_JSON_ERRORS = {sentence: code for code, sentence in SENTENCES.items() if code.startswith("json_")}


class ProblemText(str):
    """The English sentence of a problem, with its code and values."""

    __slots__ = ("code", "parts", "values")
    code: str
    values: Mapping[str, str]
    parts: Mapping[str, tuple[ProblemText, ...]]
    """The values that are sentences themselves, so that other languages can word them too."""

    def __new__(cls, code: str, /, **values: object) -> Self:
        """`got`: the wrong value, `meant`: the name that was probably meant. Both are added to any sentence."""
        parts = {
            name: value if isinstance(value, tuple) else (value,)
            for name, value in values.items()
            if isinstance(value, tuple | ProblemText)
        }
        texts = {name: str(value) for name, value in values.items() if value is not None}
        texts |= {name: "; ".join(part) for name, part in parts.items()}
        sentence = SENTENCES[code].format_map(texts)
        if "got" in texts:
            sentence += f", got {texts['got']}"
        if "meant" in texts:
            sentence += f', did you mean "{texts["meant"]}"?'
        text = super().__new__(cls, sentence)
        text.code, text.values, text.parts = code, texts, parts
        return text

    def with_got(self, got: str | None) -> ProblemText:
        """The same sentence, and the wrong value."""
        return ProblemText(self.code, **{**self.values, **self.parts, "got": got})

    def to_dict(self) -> dict[str, Any]:
        parts = {name: [part.to_dict() for part in each] for name, each in self.parts.items()}
        body = {"message": str(self), "code": self.code, "values": dict(self.values)}
        return body | {"parts": parts} if parts else body


def name_json_error(error: json.JSONDecodeError) -> str:
    """What the parser says, with a code if it is one of the usual errors."""
    code = _JSON_ERRORS.get(error.msg)
    return ProblemText(code) if code else error.msg
