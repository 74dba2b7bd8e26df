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
        SELECT a.id, a.next_in_seq - 1, count(m.in_seq), coalesce(max(m.in_seq), 0)
          FROM agents a LEFT JOIN messages m ON m.recipient = a.id AND m.in_seq IS NOT NULL
         GROUP BY a.id, a.next_in_seq
        HAVING coalesce(max(m.in_seq), 0) > a.next_in_seq - 1
            OR (count(m.in_seq) <> a.next_in_seq - 1
                AND NOT EXISTS (SELECT 1 FROM meta WHERE key = 'pruned'))
        """,
    ),
    "M3 order of delivery": (
        "message {0} was delivered before {1}, which precedes it in the mailbox",
        """
        SELECT later.id, earlier.id FROM messages later
          JOIN messages earlier ON earlier.recipient = later.recipient AND earlier.in_seq = later.in_seq - 1
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
        SELECT a.id, a.waiting, a.delayed, coalesce(m.waiting, 0), coalesce(m.delayed, 0)
          FROM agents a
          LEFT JOIN (SELECT recipient,
                            sum(CASE WHEN state = 'pending' THEN 1 ELSE 0 END) AS waiting,
                            sum(CASE WHEN state = 'delayed' THEN 1 ELSE 0 END) AS delayed
                       FROM messages GROUP BY recipient) m ON m.recipient = a.id
         WHERE a.waiting <> coalesce(m.waiting, 0) OR a.delayed <> coalesce(m.delayed, 0)
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
        SELECT a.id, a.state, count(p.agent_id)
          FROM agents a LEFT JOIN plans p ON p.agent_id = a.id AND p.outcome = 'open'
         GROUP BY a.id, a.state
        HAVING count(p.agent_id) <> CASE WHEN a.state IN ('tools', 'wait_approval') THEN 1 ELSE 0 END
        """,
    ),
    "A2 one call at a time": (
        "{0} is {1}, but {2} calls of its plan run or wait for the person",
        # A turn that a pause of the society suspended has no started call and no worker.
        """
        SELECT a.id, a.state, count(c.idx)
          FROM agents a
          JOIN plans p ON p.agent_id = a.id AND p.outcome = 'open'
          LEFT JOIN calls c ON c.agent_id = p.agent_id AND c.turn_no = p.turn_no AND c.step_no = p.step_no
                           AND c.state = CASE a.state WHEN 'tools' THEN 'started' ELSE 'gated' END
         GROUP BY a.id, a.state, a.worker
        HAVING count(c.idx) <> 1 AND NOT (a.state = 'tools' AND a.worker IS NULL AND count(c.idx) = 0)
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
        SELECT c.agent_id, c.call_id
          FROM plans p
          JOIN calls c ON c.agent_id = p.agent_id AND c.turn_no = p.turn_no AND c.step_no = p.step_no
         WHERE p.outcome = 'closed'
        EXCEPT SELECT agent_id, call_id FROM history WHERE role = 'tool'
         UNION ALL
        SELECT t.agent_id, t.call_id
          FROM history t
          JOIN calls c ON c.agent_id = t.agent_id AND c.turn_no = t.turn_no AND c.call_id = t.call_id
          LEFT JOIN history a ON a.agent_id = t.agent_id AND a.seq = t.seq - c.idx - 1
         WHERE a.calls IS NULL OR replace(a.calls, '"' || c.call_id || '"', '') = a.calls
        """,
    ),
    "H3 no result without its call": (
        "row {1} of the history of {0} is the result of {2}, which is not a call of a closed plan",
        """
        SELECT t.agent_id, t.seq, t.call_id
          FROM history t
          LEFT JOIN calls c ON c.agent_id = t.agent_id AND c.turn_no = t.turn_no AND c.call_id = t.call_id
          LEFT JOIN plans p ON p.agent_id = c.agent_id AND p.turn_no = c.turn_no AND p.step_no = c.step_no
         WHERE t.role = 'tool' AND (p.outcome IS NULL OR p.outcome <> 'closed')
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
        SELECT a.agent_id, a.seq
          FROM history a LEFT JOIN history t ON t.agent_id = a.agent_id AND t.seq = a.seq + 1
         WHERE a.calls IS NOT NULL AND (t.role IS NULL OR t.role <> 'tool')
        """,
    ),
    "H6 dense histories": (
        "the history of {0} has {1} rows, but its last row is {3} and the next one would be {2}",
        """
        SELECT a.id, count(h.seq), a.next_hist_seq, coalesce(max(h.seq), 0)
          FROM agents a LEFT JOIN history h ON h.agent_id = a.id
         GROUP BY a.id, a.next_hist_seq
        HAVING count(h.seq) <> a.next_hist_seq - 1 OR coalesce(max(h.seq), 0) <> a.next_hist_seq - 1
        """,
    ),
    "H7 taken is read": (
        "message {0} was taken by {1}, but is not in its history",
        """
        SELECT m.id, m.recipient
          FROM messages m
          JOIN agents a ON a.id = m.recipient AND a.kind = 'agent'
          LEFT JOIN history h ON h.message_id = m.id
         WHERE m.state = 'taken' AND h.message_id IS NULL AND m.in_seq > a.cleared_seq
        """,
    ),
    "H7 read is taken": (
        "row {1} of the history of {0} is message {2}, which {0} has not taken",
        """
        SELECT h.agent_id, h.seq, h.message_id
          FROM history h LEFT JOIN messages m ON m.id = h.message_id
         WHERE h.message_id IS NOT NULL
           AND (m.state <> 'taken' OR m.recipient <> h.agent_id
                OR (m.id IS NULL AND NOT EXISTS (SELECT 1 FROM meta WHERE key = 'pruned')))
        """,
    ),
    "H8 read in order": (
        "message {1} follows a later message in the history of {0}",
        """
        SELECT agent_id, message_id
          FROM (SELECT h.agent_id, h.message_id, m.in_seq,
                       lag(m.in_seq) OVER (PARTITION BY h.agent_id ORDER BY h.seq) AS previous
                  FROM history h JOIN messages m ON m.id = h.message_id) AS read_in_turn
         WHERE previous > in_seq
        """,
    ),
    "H9 results": (
        "call {1} of {0} was executed, but its result is not in the history",
        """
        SELECT c.agent_id, c.call_id, c.result
          FROM plans p
          JOIN calls c ON c.agent_id = p.agent_id AND c.turn_no = p.turn_no AND c.step_no = p.step_no
         WHERE p.outcome <> 'open' AND c.state IN ('done', 'failed', 'unknown')
        EXCEPT SELECT agent_id, call_id, content FROM history WHERE role = 'tool'
        """,
    ),
    "H9 ended calls": (
        "call {1} of {0} is {2}, but its plan is {3}",
        """
        SELECT c.agent_id, c.call_id, c.state, p.outcome
          FROM plans p
          JOIN calls c ON c.agent_id = p.agent_id AND c.turn_no = p.turn_no AND c.step_no = p.step_no
         WHERE (p.outcome = 'closed' AND c.state IN ('planned', 'gated', 'started'))
            OR (p.outcome = 'withdrawn' AND c.state <> 'cancelled')
        """,
    ),
    "H10 summaries end between groups": (
        "the summary of {0} ends at row {1}, inside a call group or after the last row",
        """
        SELECT s.agent_id, s.upto
          FROM summaries s
          JOIN agents a ON a.id = s.agent_id
          LEFT JOIN history h ON h.agent_id = s.agent_id AND h.seq = s.upto + 1
         WHERE h.role = 'tool' OR s.upto >= a.next_hist_seq
        """,
    ),
    "H13 withdrawn plans": (
        "row {1} of the history of {0} makes call {2}, which was withdrawn",
        """
        SELECT a.agent_id, a.seq, c.call_id
          FROM history a
         CROSS JOIN calls c
         CROSS JOIN plans p
         WHERE a.calls IS NOT NULL AND c.agent_id = a.agent_id AND c.turn_no = a.turn_no AND c.idx = 0
           AND p.agent_id = c.agent_id AND p.turn_no = c.turn_no AND p.step_no = c.step_no AND p.outcome = 'withdrawn'
           AND replace(a.calls, '"' || c.call_id || '"', '') <> a.calls
        """,
    ),
    "H8 taken in order": (
        "{0} has taken messages up to position {1}, but message {2} before it still waits",
        """
        SELECT a.id, a.taken_seq, m.id FROM agents a
          JOIN messages m ON m.recipient = a.id AND m.state = 'pending' AND m.in_seq <= a.taken_seq
        """,
    ),
    "H12 attachments exist": (
        "message {0} names the artifact {1}, which does not exist",
        """
        SELECT m.id, t.artifact_ref FROM attachments t JOIN messages m ON m.seq = t.message_seq
         WHERE NOT EXISTS (SELECT 1 FROM artifacts a WHERE a.ref = t.artifact_ref)
        """,
    ),
    "H12 sizes": (
        "message {0} has a payload of {1} characters, beyond the limit",
        "SELECT id, length(payload) FROM messages WHERE length(payload) > 1048576",
    ),
    "questions and answers": (
        "question {0} is answered by {1}, which is not an accepted message of the person to the asker",
        """
        SELECT q.id, q.answered_by
          FROM messages q LEFT JOIN messages m ON m.id = q.answered_by
         WHERE q.answered_by IS NOT NULL AND q.answered_by <> q.id
           AND (q.question = 0 OR m.sender <> 'user' OR m.recipient <> q.sender OR m.state = 'withdrawn'
                OR (q.answered_option IS NOT NULL AND (m.option IS NULL OR m.option <> q.answered_option
                                                       OR m.in_reply_to <> q.id))
                OR (m.id IS NULL AND NOT EXISTS (SELECT 1 FROM meta WHERE key = 'pruned')))
        """,
    ),
    "one answer": (
        "the button that {0} pressed on question {1} does not count",
        """
        SELECT m.id, q.id
          FROM messages m JOIN messages q ON q.id = m.in_reply_to AND q.question = 1
         WHERE m.sender = 'user' AND m.option IS NOT NULL AND m.state <> 'withdrawn'
           AND (q.answered_by IS NULL OR q.answered_by <> m.id)
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
        SELECT m.id, q.id FROM messages m JOIN messages q ON q.id = m.in_reply_to WHERE q.seq >= m.seq
        """,
    ),
}


def describe_violation(name: str, row: Sequence[Any]) -> str:
    """Describe the violation `row` that the query of the invariant `name` returned."""
    return f"{name}: {INVARIANTS[name][0].format(*row)}"
