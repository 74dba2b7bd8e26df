"""Everything at one glance, as it was at one moment."""

from __future__ import annotations

from coterie.agents import Agent
from coterie.messages import Message
from coterie.overview import SHOWN, Snapshot, Thread
from coterie.stores.sql.connection import Connection
from coterie.stores.sql.ledger import PAUSED
from coterie.stores.sql.rows import AGENT, AGENTS, M_MESSAGE, MESSAGE, to_agent, to_message
from coterie.stores.sql.threads import count_open_questions, open_questions

_COUNTS = """
SELECT count(*), coalesce(sum(waiting), 0), (SELECT coalesce(sum(delayed), 0) FROM agents) FROM agents
 WHERE kind = 'agent'
"""
_LAST_OF_THREAD = """
(SELECT seq FROM messages WHERE thread = a.id AND delivered_at IS NOT NULL
  ORDER BY delivered_at DESC, seq DESC LIMIT 1)
"""
_UNREAD = "messages u WHERE u.thread = a.id AND u.sender <> 'user' AND u.state = 'pending'"
_THREADS = f"""
SELECT {M_MESSAGE}, a.id, (SELECT count(*) FROM {_UNREAD}),
       (SELECT u.id FROM {_UNREAD} ORDER BY u.delivered_at, u.seq LIMIT 1)
  FROM agents a JOIN messages m ON m.seq = {_LAST_OF_THREAD}
 ORDER BY m.delivered_at DESC, m.seq DESC LIMIT ?
"""
_THREAD_COUNT = f"SELECT count({_LAST_OF_THREAD}) FROM agents a"
# The agents first: few of them have mail, and each one's lies together.
_QUEUES = f"""
SELECT {M_MESSAGE} FROM agents a CROSS JOIN messages m
 WHERE a.kind = 'agent' AND a.waiting > 0 AND m.recipient = a.id AND m.in_seq > a.taken_seq AND m.state = 'pending'
 ORDER BY a.id, m.in_seq LIMIT ?
"""
_DELAYED = f"SELECT {MESSAGE} FROM messages WHERE state = 'delayed' ORDER BY deliver_at, seq LIMIT ?"
_AGENTS = f"SELECT {AGENT} FROM {AGENTS} WHERE kind = 'agent' ORDER BY state = 'terminated', id LIMIT ?"


def snapshot(db: Connection) -> Snapshot:
    """Inside a transaction that sees one moment."""
    (seq,) = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
    agent_count, queue_count, delayed_count = db.execute(_COUNTS).fetchone()
    (thread_count,) = db.execute(_THREAD_COUNT).fetchone()
    return Snapshot(
        seq=seq,
        paused=bool(db.execute(PAUSED).fetchone()[0]),
        agents=_agents(db),
        agent_count=agent_count,
        threads=_threads(db),
        thread_count=thread_count,
        queues=_messages(db, _QUEUES),
        queue_count=queue_count,
        delayed=_messages(db, _DELAYED),
        delayed_count=delayed_count,
        open_questions=open_questions(db, None, SHOWN),
        question_count=count_open_questions(db),
    )


def _agents(db: Connection) -> list[Agent]:
    return [to_agent(row) for row in db.execute(_AGENTS, (SHOWN,))]


def _threads(db: Connection) -> list[Thread]:
    return [
        Thread(agent_id=agent_id, last=to_message(tuple(last)), unread=unread, first_unread=first_unread)
        for *last, agent_id, unread, first_unread in db.execute(_THREADS, (SHOWN,))
    ]


def _messages(db: Connection, sql: str) -> list[Message]:
    return [to_message(row) for row in db.execute(sql, (SHOWN,))]
