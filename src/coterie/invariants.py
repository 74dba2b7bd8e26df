"""What must hold in every stored society, as queries that return whatever contradicts it.

Plain SQL that every engine understands. The names are those of the guarantees in the documentation.
"""

from __future__ import annotations

INVARIANTS: dict[str, tuple[str, str]] = {
    "M1 one state": (
        "message {0} is {1} but its times and place say otherwise",
        """
        SELECT id, state FROM messages
         WHERE (state = 'delayed' AND (deliver_at IS NULL OR in_seq IS NOT NULL OR delivered_at IS NOT NULL))
            OR (state IN ('pending', 'taken') AND (in_seq IS NULL OR delivered_at IS NULL))
            OR (state = 'taken') <> (taken_at IS NOT NULL)
            OR (in_seq IS NULL) <> (delivered_at IS NULL)
            OR (state = 'dead') <> (reason IS NOT NULL)
        """,
    ),
    "M3 dense mailboxes": (
        "{0} has given out {1} places in the mailbox, but {2} messages hold one, the last at {3}",
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
        "message {0} was delivered before {1}, which stands ahead of it in the mailbox",
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
    "H8 taken in order": (
        "{0} has taken up to place {1}, but message {2} before it still waits",
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
    "replies point somewhere": (
        "message {0} answers {1}, which was sent after it",
        """
        SELECT m.id, q.id FROM messages m JOIN messages q ON q.id = m.in_reply_to WHERE q.seq >= m.seq
        """,
    ),
}
