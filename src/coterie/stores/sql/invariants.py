"""Invariants of every stored society, as SQL queries that return violations. Names match docs/guarantees.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INVARIANTS: dict[str, tuple[str, str]] = {
    "M1 one state": (
        "message {0} is {1}, but its times or mailbox position contradict that",
        """
        SELECT id, state FROM messages
         WHERE (state = 'delayed' AND (deliver_at IS NULL OR in_seq IS NOT NULL OR delivered_at IS NOT NULL))
            OR (state IN ('pending', 'taken') AND (in_seq IS NULL OR delivered_at IS NULL))
            OR (state = 'taken') <> (taken_at IS NOT NULL)
            OR (in_seq IS NULL) <> (delivered_at IS NULL)
            OR (state = 'dead') <> (reason IS NOT NULL)
        """,
    ),
    "M1 times of the calendar": (
        "message {0} has a time outside the years 1970 to 9999",
        """
        SELECT id FROM messages
         WHERE created_at NOT BETWEEN 0 AND 253402300799999 OR deliver_at NOT BETWEEN 0 AND 253402300799999
            OR delivered_at NOT BETWEEN 0 AND 253402300799999 OR taken_at NOT BETWEEN 0 AND 253402300799999
        """,
    ),
    "M3 dense mailboxes": (
        "{0} has assigned {1} mailbox positions, but {2} messages have one, the last is {3}",
        """
        SELECT agents.id, agents.next_in_seq - 1, count(messages.in_seq), coalesce(max(messages.in_seq), 0)
          FROM agents LEFT JOIN messages ON messages.recipient = agents.id AND messages.in_seq IS NOT NULL
         GROUP BY agents.id, agents.next_in_seq
        HAVING coalesce(max(messages.in_seq), 0) > agents.next_in_seq - 1
            OR (count(messages.in_seq) <> agents.next_in_seq - 1
                AND NOT EXISTS (SELECT 1 FROM meta WHERE key = 'pruned'))
        """,
    ),
    "M3 order of delivery": (
        "message {0} was delivered before {1}, which precedes it in the mailbox",
        """
        SELECT later.id, earlier.id FROM messages AS later
          JOIN messages AS earlier ON earlier.recipient = later.recipient AND earlier.in_seq = later.in_seq - 1
         WHERE later.delivered_at < earlier.delivered_at
        """,
    ),
    "M5 never early": (
        "message {0} was due at {1} and delivered at {2}, too early",
        """
        SELECT id, deliver_at, delivered_at FROM messages
         WHERE delivered_at < deliver_at AND early = 0
        """,
    ),
    "counters": (
        "{0} counts {1} waiting and {2} delayed messages, but has {3} and {4}",
        """
        SELECT agents.id, agents.waiting, agents.delayed, coalesce(counted.waiting, 0), coalesce(counted.delayed, 0)
          FROM agents
          LEFT JOIN (SELECT recipient,
                            sum(CASE WHEN state = 'pending' THEN 1 ELSE 0 END) AS waiting,
                            sum(CASE WHEN state = 'delayed' THEN 1 ELSE 0 END) AS delayed
                       FROM messages GROUP BY recipient) AS counted ON counted.recipient = agents.id
         WHERE agents.waiting <> coalesce(counted.waiting, 0) OR agents.delayed <> coalesce(counted.delayed, 0)
        """,
    ),
    "A1 idle agents have no mail": (
        "{0} is {1} with {2} messages waiting",
        """
        SELECT id, state, waiting FROM agents
         WHERE kind = 'agent'
           AND ((state IN ('idle', 'terminated') AND waiting > 0)
                OR (state = 'ready' AND (waiting = 0 OR runnable_at IS NULL)))
        """,
    ),
    "A1 resting agents are left alone": (
        "{0} is {1}, but is scheduled to run at {2}",
        "SELECT id, state, runnable_at FROM agents WHERE state IN ('idle', 'terminated') AND runnable_at IS NOT NULL",
    ),
    "A2 plans and states": (
        "{0} is {1} and has {2} open plans",
        """
        SELECT agents.id, agents.state, count(plans.agent_id)
          FROM agents LEFT JOIN plans ON plans.agent_id = agents.id AND plans.outcome = 'open'
         GROUP BY agents.id, agents.state
        HAVING count(plans.agent_id) <> CASE WHEN agents.state IN ('tools', 'wait_approval') THEN 1 ELSE 0 END
        """,
    ),
    "A2 one call at a time": (
        "{0} is {1}, but {2} calls of its plan run or wait for the person",
        # A turn that a pause of the society suspended has no started call and no worker.
        """
        SELECT agents.id, agents.state, count(calls.idx)
          FROM agents
          JOIN plans ON plans.agent_id = agents.id AND plans.outcome = 'open'
          LEFT JOIN calls ON calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no
                         AND calls.step_no = plans.step_no
                         AND calls.state = CASE agents.state WHEN 'tools' THEN 'started' ELSE 'gated' END
         GROUP BY agents.id, agents.state, agents.worker
        HAVING count(calls.idx) <> 1 AND NOT (agents.state = 'tools' AND agents.worker IS NULL AND count(calls.idx) = 0)
        """,
    ),
    "H1 rows fit their roles": (
        "row {1} of the history of {0} has role {2}, but the columns of another role",
        """
        SELECT agent_id, seq, role FROM history
         WHERE (role = 'user') <> (message_id IS NOT NULL)
            OR (role = 'tool') <> (call_id IS NOT NULL)
            OR (calls IS NOT NULL AND role <> 'assistant')
        """,
    ),
    "H2 whole groups": (
        "call {1} of {0} is closed, but its result is not at its position after the call",
        """
        SELECT calls.agent_id, calls.call_id
          FROM plans
          JOIN calls ON calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no
                    AND calls.step_no = plans.step_no
         WHERE plans.outcome = 'closed'
        EXCEPT SELECT agent_id, call_id FROM history WHERE role = 'tool'
         UNION ALL
        SELECT result.agent_id, result.call_id
          FROM history AS result
          JOIN calls ON calls.agent_id = result.agent_id AND calls.turn_no = result.turn_no
                    AND calls.call_id = result.call_id
          LEFT JOIN history AS request
                 ON request.agent_id = result.agent_id AND request.seq = result.seq - calls.idx - 1
         WHERE request.calls IS NULL OR replace(request.calls, '"' || calls.call_id || '"', '') = request.calls
        """,
    ),
    "H3 no result without its call": (
        "row {1} of the history of {0} is the result of {2}, which is not a call of a closed plan",
        """
        SELECT history.agent_id, history.seq, history.call_id
          FROM history
          LEFT JOIN calls ON calls.agent_id = history.agent_id AND calls.turn_no = history.turn_no
                         AND calls.call_id = history.call_id
          LEFT JOIN plans ON plans.agent_id = calls.agent_id AND plans.turn_no = calls.turn_no
                         AND plans.step_no = calls.step_no
         WHERE history.role = 'tool' AND (plans.outcome IS NULL OR plans.outcome <> 'closed')
        """,
    ),
    "H4 call ids": (
        "{0} has {2} calls or results with the id {1}",
        """
        SELECT agent_id, call_id, count(*) FROM calls GROUP BY agent_id, call_id HAVING count(*) > 1
         UNION ALL
        SELECT agent_id, call_id, count(*) FROM history WHERE call_id IS NOT NULL
         GROUP BY agent_id, call_id HAVING count(*) > 1
        """,
    ),
    "H5 closed groups": (
        "row {1} of the history of {0} makes calls, and no result follows it",
        """
        SELECT request.agent_id, request.seq
          FROM history AS request
          LEFT JOIN history AS result ON result.agent_id = request.agent_id AND result.seq = request.seq + 1
         WHERE request.calls IS NOT NULL AND (result.role IS NULL OR result.role <> 'tool')
        """,
    ),
    "H6 dense histories": (
        "the history of {0} has {1} rows, but its last row is {3} and the next one would be {2}",
        """
        SELECT agents.id, count(history.seq), agents.next_hist_seq, coalesce(max(history.seq), 0)
          FROM agents LEFT JOIN history ON history.agent_id = agents.id
         GROUP BY agents.id, agents.next_hist_seq
        HAVING count(history.seq) <> agents.next_hist_seq - 1
            OR coalesce(max(history.seq), 0) <> agents.next_hist_seq - 1
        """,
    ),
    "H7 taken is read": (
        "message {0} was taken by {1}, but is not in its history",
        """
        SELECT messages.id, messages.recipient
          FROM messages
          JOIN agents ON agents.id = messages.recipient AND agents.kind = 'agent'
          LEFT JOIN history ON history.message_id = messages.id
         WHERE messages.state = 'taken' AND history.message_id IS NULL AND messages.in_seq > agents.cleared_seq
        """,
    ),
    "H7 read is taken": (
        "row {1} of the history of {0} is message {2}, which {0} has not taken",
        """
        SELECT history.agent_id, history.seq, history.message_id
          FROM history LEFT JOIN messages ON messages.id = history.message_id
         WHERE history.message_id IS NOT NULL
           AND (messages.state <> 'taken' OR messages.recipient <> history.agent_id
                OR (messages.id IS NULL AND NOT EXISTS (SELECT 1 FROM meta WHERE key = 'pruned')))
        """,
    ),
    "H8 read in order": (
        "message {1} follows a later message in the history of {0}",
        """
        SELECT agent_id, message_id
          FROM (SELECT history.agent_id, history.message_id, messages.in_seq,
                       lag(messages.in_seq) OVER (PARTITION BY history.agent_id ORDER BY history.seq) AS previous
                  FROM history JOIN messages ON messages.id = history.message_id) AS positions
         WHERE previous > in_seq
        """,
    ),
    "H9 results": (
        "call {1} of {0} was executed, but its result is not in the history",
        """
        SELECT calls.agent_id, calls.call_id, calls.result
          FROM plans
          JOIN calls ON calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no
                    AND calls.step_no = plans.step_no
         WHERE plans.outcome <> 'open' AND calls.state IN ('done', 'failed', 'unknown')
        EXCEPT SELECT agent_id, call_id, content FROM history WHERE role = 'tool'
        """,
    ),
    "H9 ended calls": (
        "call {1} of {0} is {2}, but its plan is {3}",
        """
        SELECT calls.agent_id, calls.call_id, calls.state, plans.outcome
          FROM plans
          JOIN calls ON calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no
                    AND calls.step_no = plans.step_no
         WHERE (plans.outcome = 'closed' AND calls.state IN ('planned', 'gated', 'started'))
            OR (plans.outcome = 'withdrawn' AND calls.state <> 'cancelled')
        """,
    ),
    "H10 summaries end between groups": (
        "the summary of {0} ends at row {1}, inside a call group or after the last row",
        """
        SELECT summaries.agent_id, summaries.upto
          FROM summaries
          JOIN agents ON agents.id = summaries.agent_id
          LEFT JOIN history ON history.agent_id = summaries.agent_id AND history.seq = summaries.upto + 1
         WHERE history.role = 'tool' OR summaries.upto >= agents.next_hist_seq
        """,
    ),
    "H13 withdrawn plans": (
        "row {1} of the history of {0} makes call {2}, which was withdrawn",
        """
        SELECT history.agent_id, history.seq, calls.call_id
          FROM history
         CROSS JOIN calls
         CROSS JOIN plans
         WHERE history.calls IS NOT NULL AND calls.agent_id = history.agent_id AND calls.turn_no = history.turn_no
           AND calls.idx = 0 AND plans.agent_id = calls.agent_id AND plans.turn_no = calls.turn_no
           AND plans.step_no = calls.step_no AND plans.outcome = 'withdrawn'
           AND replace(history.calls, '"' || calls.call_id || '"', '') <> history.calls
        """,
    ),
    "H8 taken in order": (
        "{0} has taken messages up to position {1}, but message {2} before it still waits",
        """
        SELECT agents.id, agents.taken_seq, messages.id FROM agents
          JOIN messages ON messages.recipient = agents.id AND messages.state = 'pending'
                       AND messages.in_seq <= agents.taken_seq
        """,
    ),
    "H12 attachments exist": (
        "message {0} names the artifact {1}, which does not exist",
        """
        SELECT messages.id, attachments.artifact_ref
          FROM attachments JOIN messages ON messages.seq = attachments.message_seq
         WHERE NOT EXISTS (SELECT 1 FROM artifacts WHERE artifacts.ref = attachments.artifact_ref)
        """,
    ),
    "H12 sizes": (
        "message {0} has a payload of {1} characters, beyond the limit",
        "SELECT id, length(payload) FROM messages WHERE length(payload) > 1048576",
    ),
    "questions and answers": (
        "question {0} is answered by {1}, which is not an accepted message of the person to the asker",
        """
        SELECT asked.id, asked.answered_by
          FROM messages AS asked LEFT JOIN messages AS answer ON answer.id = asked.answered_by
         WHERE asked.answered_by IS NOT NULL AND asked.answered_by <> asked.id
           AND (asked.question = 0 OR answer.sender <> 'user' OR answer.recipient <> asked.sender
                OR answer.state = 'withdrawn'
                OR (asked.answered_option IS NOT NULL
                    AND (answer.option IS NULL OR answer.option <> asked.answered_option
                         OR answer.in_reply_to <> asked.id))
                OR (answer.id IS NULL AND NOT EXISTS (SELECT 1 FROM meta WHERE key = 'pruned')))
        """,
    ),
    "one answer": (
        "the button that {0} pressed on question {1} does not count",
        """
        SELECT answer.id, asked.id
          FROM messages AS answer JOIN messages AS asked ON asked.id = answer.in_reply_to AND asked.question = 1
         WHERE answer.sender = 'user' AND answer.option IS NOT NULL AND answer.state <> 'withdrawn'
           AND (asked.answered_by IS NULL OR asked.answered_by <> answer.id)
        """,
    ),
    "threads": (
        "message {0} is in the wrong conversation: {1}",
        """
        SELECT id, coalesce(thread, 'nobody') FROM messages
         WHERE (sender = 'user' AND recipient <> 'user' AND (thread IS NULL OR thread <> recipient))
            OR (recipient = 'user' AND sender NOT IN ('user', 'system') AND (thread IS NULL OR thread <> sender))
            OR (thread IS NOT NULL AND (sender = 'user') = (recipient = 'user'))
        """,
    ),
    "replies point somewhere": (
        "message {0} answers {1}, which was sent after it",
        """
        SELECT reply.id, asked.id
          FROM messages AS reply JOIN messages AS asked ON asked.id = reply.in_reply_to
         WHERE asked.seq >= reply.seq
        """,
    ),
}


def describe_violation(name: str, row: Sequence[Any]) -> str:
    """Describe the violation `row` that the query of the invariant `name` returned."""
    return f"{name}: {INVARIANTS[name][0].format(*row)}"
