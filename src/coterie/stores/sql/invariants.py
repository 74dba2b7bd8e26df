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
        "{0} counts {1} waiting messages of {2} characters and {3} delayed ones, but has {4} of {5} and {6}",
        """
        SELECT agents.id, agents.waiting, agents.waiting_bytes, agents.delayed,
               coalesce(counted.waiting, 0), coalesce(counted.size, 0), coalesce(counted.delayed, 0)
          FROM agents
          LEFT JOIN (SELECT recipient,
                            sum(CASE WHEN state = 'pending' THEN 1 ELSE 0 END) AS waiting,
                            sum(CASE WHEN state = 'pending' THEN length(payload) ELSE 0 END) AS size,
                            sum(CASE WHEN state = 'delayed' THEN 1 ELSE 0 END) AS delayed
                       FROM messages GROUP BY recipient) AS counted ON counted.recipient = agents.id
         WHERE agents.waiting <> coalesce(counted.waiting, 0) OR agents.waiting_bytes <> coalesce(counted.size, 0)
            OR agents.delayed <> coalesce(counted.delayed, 0)
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
           AND NOT (agents.state = 'llm' AND count(plans.agent_id) = 1)
        """,
    ),
    "A2 one call at a time": (
        "{0} is {1}, but {2} calls of its plan run or wait for the person",
        # A turn that a pause of the society suspended has no started call and no worker. While the model answers a
        # question about a call (state 'llm'), that call waits for approval.
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
        HAVING count(history.seq) <> agents.next_hist_seq - coalesce(min(history.seq), agents.next_hist_seq)
            OR coalesce(max(history.seq), agents.next_hist_seq - 1) <> agents.next_hist_seq - 1
            OR (coalesce(min(history.seq), agents.next_hist_seq) > 1
                AND NOT EXISTS (SELECT 1 FROM meta WHERE key = 'pruned'))
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
    "positions of the person's mail": (
        "message {1} of the person waits for {0} at a position where it is not looked for",
        """
        SELECT agents.id, messages.id FROM agents
          JOIN messages ON messages.recipient = agents.id AND messages.state = 'pending' AND messages.sender = 'user'
                       AND messages.in_seq > agents.taken_seq
         WHERE agents.kind = 'agent'
           AND NOT messages.in_seq BETWEEN agents.first_from_person AND agents.last_from_person
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
                OR (answer.state = 'withdrawn'
                    AND NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.id = coalesce(asked.task, asked.id)
                                       AND tasks.stopped_at IS NOT NULL))
                OR (asked.answered_option IS NOT NULL AND answer.id IS NOT NULL
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
         WHERE answer.sender = 'user' AND answer.option >= 0 AND answer.state <> 'withdrawn'
           AND (asked.answered_by IS NULL OR asked.answered_by <> answer.id)
        """,
    ),
    "threads": (
        "message {0} is in the wrong conversation: {1}",
        """
        SELECT id, coalesce(thread, 'none') FROM messages
         WHERE (sender = 'user' AND recipient <> 'user' AND (thread IS NULL OR thread <> recipient))
            OR (recipient = 'user' AND sender NOT IN ('user', 'system') AND (thread IS NULL OR thread <> sender))
            OR (thread IS NOT NULL AND (sender = 'user') = (recipient = 'user'))
        """,
    ),
    "S1 one next occurrence": (
        "the recurring message {0} is {1} and has {2} next occurrences",
        """
        SELECT schedules.id, schedules.state, count(messages.seq)
          FROM schedules LEFT JOIN messages ON messages.schedule_id = schedules.id AND messages.state = 'delayed'
         GROUP BY schedules.id, schedules.state, schedules.message_id
        HAVING count(messages.seq) <> CASE schedules.state WHEN 'active' THEN 1 ELSE 0 END
            OR (schedules.state = 'active' AND max(messages.id) <> schedules.message_id)
        """,
    ),
    "S2 no occurrence without its schedule": (
        "the delayed message {0} belongs to the recurring message {1}, which does not exist",
        """
        SELECT id, schedule_id FROM messages
         WHERE state = 'delayed' AND schedule_id IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM schedules WHERE schedules.id = messages.schedule_id)
        """,
    ),
    "T1 every message has a task": (
        "message {0} belongs to the task {1}, which does not exist",
        # A message that starts a task when it is due has none before; one that waits for an agent, until it is taken.
        """
        SELECT messages.id, coalesce(messages.task, messages.id) FROM messages
         WHERE NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.id = coalesce(messages.task, messages.id))
           AND NOT (messages.task IS NULL AND messages.delivered_at IS NULL AND messages.deliver_at IS NOT NULL
                    AND (messages.schedule_id IS NOT NULL OR messages.deliver_at - messages.created_at >= 60000))
           AND NOT (messages.task IS NULL AND messages.state = 'pending' AND messages.deliver_at IS NULL
                    AND messages.recipient <> 'user')
        """,
    ),
    "T2 what keeps a task open": (
        "the task {0} counts {1} messages that wait and {2} open questions, but has {3} and {4}",
        """
        SELECT tasks.id, tasks.queued, tasks.questions, coalesce(counted.queued, 0), coalesce(counted.questions, 0)
          FROM tasks
          LEFT JOIN (SELECT CAST(coalesce(task, id) AS TEXT) AS task,
                            sum(CASE WHEN (state = 'pending' AND recipient <> 'user')
                                       OR (state = 'delayed' AND deliver_at - created_at < 60000
                                           AND schedule_id IS NULL) THEN 1 ELSE 0 END) AS queued,
                            sum(CASE WHEN question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken')
                                     THEN 1 ELSE 0 END) AS questions
                       FROM messages GROUP BY coalesce(task, id)) AS counted ON counted.task = tasks.id
         WHERE tasks.queued <> coalesce(counted.queued, 0) OR tasks.questions <> coalesce(counted.questions, 0)
        """,
    ),
    "T2 agents at work": (
        "the task {0} counts {1} agents at work, but has {2}",
        """
        SELECT tasks.id, tasks.active, coalesce(own.agents, 0) + coalesce(shared.agents, 0)
          FROM tasks
          LEFT JOIN (SELECT task, count(*) AS agents FROM agents
                      WHERE task IS NOT NULL
                        AND (state IN ('llm', 'tools', 'wait_retry')
                             OR (state = 'blocked' AND over_budget <> 0 AND runnable_at IS NOT NULL))
                      GROUP BY task) AS own
                 ON own.task = tasks.id
          LEFT JOIN (SELECT others.id AS task, count(*) AS agents
                       FROM agents JOIN tasks AS others
                         ON replace(agents.other_tasks, others.id, '') <> agents.other_tasks
                      WHERE agents.other_tasks IS NOT NULL
                        AND agents.state IN ('llm', 'tools', 'wait_retry', 'wait_approval')
                      GROUP BY others.id) AS shared
                 ON shared.task = tasks.id
         WHERE tasks.active <> coalesce(own.agents, 0) + coalesce(shared.agents, 0)
        """,
    ),
    "T2 state of a task": (
        "the task {0} is {1}, but its counters say otherwise",
        """
        SELECT id, state FROM tasks
         WHERE state <> CASE WHEN stopped_at IS NOT NULL THEN 'stopped' WHEN queued + active > 0 THEN 'working'
                             WHEN questions > 0 THEN 'waiting' WHEN failed = 1 THEN 'failed' ELSE 'done' END
        """,
    ),
    "T3 a stopped task has nothing left": (
        "the task {0} was stopped, but {1} messages wait, {2} agents work and {3} questions are open",
        """
        SELECT id, queued, active, questions FROM tasks
         WHERE stopped_at IS NOT NULL AND (queued <> 0 OR active <> 0 OR questions <> 0)
         UNION ALL
        SELECT tasks.id, 1, 0, 0 FROM tasks
          JOIN messages ON messages.parent_task = tasks.id AND messages.state = 'delayed'
         WHERE tasks.stopped_at IS NOT NULL
         UNION ALL
        SELECT tasks.id, 0, 1, 0 FROM tasks JOIN agents ON agents.task = tasks.id
         WHERE tasks.stopped_at IS NOT NULL
        """,
    ),
    "T4 open turns": (
        "turn {1} of {0} has ended for the task {2}, or never began, but the agent works on it for {3}",
        """
        SELECT agents.id, agents.turn_no, turns.task, agents.task
          FROM turns JOIN agents ON agents.id = turns.agent_id AND agents.turn_no = turns.turn_no
         WHERE agents.task IS NOT NULL
         UNION ALL
        SELECT id, turn_no, 'none', coalesce(task, 'none') FROM agents WHERE (task IS NULL) <> (turn_began IS NULL)
        """,
    ),
    "T4 tasks of resting agents": (
        "{0} is {1} without a turn, but is at work on the task {2}",
        """
        SELECT id, state, task FROM agents
         WHERE state IN ('idle', 'ready', 'paused', 'terminated') AND (task IS NOT NULL OR other_tasks IS NOT NULL)
            OR (over_budget = 1 AND state <> 'blocked')
        """,
    ),
    "T5 what a task has used": (
        "the task {0} counts {1} turns, {2} requests, {3} tokens and a cost of {4}, but has {5}, {6}, {7} and {8}",
        """
        SELECT tasks.id, tasks.turns, tasks.requests, tasks.input_tokens + tasks.output_tokens, tasks.cost,
               coalesce(counted.turns, 0), coalesce(used.requests, 0), coalesce(used.tokens, 0), coalesce(used.cost, 0)
          FROM tasks
          LEFT JOIN (SELECT task, count(*) AS turns FROM all_turns GROUP BY task) AS counted ON counted.task = tasks.id
          LEFT JOIN (SELECT task, count(*) AS requests, sum(input_tokens + output_tokens) AS tokens,
                            coalesce(sum(cost), 0) AS cost, sum(CASE WHEN cost IS NULL THEN 1 ELSE 0 END) AS unpriced,
                            sum(model_ms) AS model_ms, sum(cached_tokens) AS cached
                       FROM llm_calls WHERE task IS NOT NULL GROUP BY task) AS used ON used.task = tasks.id
         WHERE tasks.turns <> coalesce(counted.turns, 0) OR tasks.requests <> coalesce(used.requests, 0)
            OR tasks.input_tokens + tasks.output_tokens <> coalesce(used.tokens, 0)
            OR tasks.cost <> coalesce(used.cost, 0) OR tasks.unpriced <> coalesce(used.unpriced, 0)
            OR tasks.model_ms <> coalesce(used.model_ms, 0) OR tasks.cached_tokens <> coalesce(used.cached, 0)
        """,
    ),
    "T5 messages and calls of a task": (
        "the task {0} counts {1} messages and {2} tool calls, but has {3} and {4}",
        # Cleared conversations and pruned messages are still counted.
        """
        SELECT tasks.id, tasks.messages, tasks.tool_calls, coalesce(counted.messages, 0), coalesce(ran.calls, 0)
          FROM tasks
          LEFT JOIN (SELECT CAST(coalesce(task, id) AS TEXT) AS task, count(*) AS messages FROM messages
                      GROUP BY coalesce(task, id)) AS counted ON counted.task = tasks.id
          LEFT JOIN (SELECT plans.task, count(*) AS calls FROM plans
                       JOIN calls ON calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no
                                 AND calls.step_no = plans.step_no
                      WHERE plans.outcome <> 'withdrawn' GROUP BY plans.task) AS ran
                 ON ran.task = tasks.id
         WHERE (tasks.messages < coalesce(counted.messages, 0) OR tasks.tool_calls < coalesce(ran.calls, 0)
                OR NOT EXISTS (SELECT 1 FROM meta WHERE key = 'pruned'))
           AND (tasks.messages <> coalesce(counted.messages, 0) OR tasks.tool_calls <> coalesce(ran.calls, 0))
        """,
    ),
    "T6 one budget question": (
        "the task {0} has {1} open budget questions, but its row names {2}",
        """
        SELECT tasks.id, count(messages.id), coalesce(tasks.budget_question, 'none')
          FROM tasks
          LEFT JOIN messages ON messages.id = tasks.budget_question AND messages.answered_by IS NULL
         GROUP BY tasks.id, tasks.budget_question
        HAVING count(messages.id) <> CASE WHEN tasks.budget_question IS NULL THEN 0 ELSE 1 END
        """,
    ),
    "T7 messages that an answer withdraws": (
        "{0} counts {1} delayed messages that an answer withdraws, but has {2}",
        """
        SELECT agents.id, agents.reminders, count(messages.id)
          FROM agents
          LEFT JOIN messages ON messages.sender = agents.id AND messages.unless_answered IS NOT NULL
                            AND messages.state = 'delayed'
         GROUP BY agents.id, agents.reminders HAVING agents.reminders <> count(messages.id)
        """,
    ),
    "T7 no such message after its answer": (
        "the delayed message {0} waits for an answer to {1}, which is answered by {2}",
        """
        SELECT delayed.id, asked.id, coalesce(asked.answered_by, answer.id)
          FROM messages AS delayed
          JOIN messages AS asked ON asked.id = delayed.unless_answered
          LEFT JOIN messages AS answer ON answer.in_reply_to = asked.id AND answer.sender = asked.recipient
                                      AND answer.recipient = asked.sender
                                      AND answer.state NOT IN ('withdrawn', 'dead')
                                      AND coalesce(answer.option, 0) >= 0
         WHERE delayed.state = 'delayed' AND delayed.unless_answered IS NOT NULL
           AND ((asked.answered_by IS NOT NULL AND asked.answered_by <> asked.id) OR answer.id IS NOT NULL)
        """,
    ),
    "indexed messages exist": (
        "the text index has an entry for message number {0}, which does not exist",
        """
        SELECT rowid FROM message_grams
         WHERE NOT EXISTS (SELECT 1 FROM messages WHERE messages.seq = message_grams.rowid)
           AND NOT EXISTS (SELECT 1 FROM index_removals WHERE index_removals.seq = message_grams.rowid)
        """,
    ),
    "messages are indexed": (
        "message {0} is missing in the text index, so a search does not find it",
        """
        SELECT id FROM messages
         WHERE seq <= (SELECT CAST(value AS BIGINT) FROM meta WHERE key = 'text_index_position')
           AND NOT EXISTS (SELECT 1 FROM message_grams WHERE message_grams.rowid = messages.seq)
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

MAIL_COUNTERS = "counters"
"""The invariant whose violations `RECOUNT_MAIL` mends: the counters say nothing that the messages do not say."""
RECOUNT_MAIL = """
UPDATE agents SET waiting = counted.waiting, waiting_bytes = counted.size, delayed = counted.delayed
  FROM (SELECT own.id AS id,
               sum(CASE WHEN messages.state = 'pending' THEN 1 ELSE 0 END) AS waiting,
               sum(CASE WHEN messages.state = 'pending' THEN length(messages.payload) ELSE 0 END) AS size,
               sum(CASE WHEN messages.state = 'delayed' THEN 1 ELSE 0 END) AS delayed
          FROM agents AS own LEFT JOIN messages ON messages.recipient = own.id GROUP BY own.id) AS counted
 WHERE counted.id = agents.id
   AND (agents.waiting <> counted.waiting OR agents.waiting_bytes <> counted.size OR agents.delayed <> counted.delayed)
"""


def describe_violation(name: str, row: Sequence[Any]) -> str:
    """Describe the violation `row` that the query of the invariant `name` returned."""
    return f"{name}: {INVARIANTS[name][0].format(*row)}"
