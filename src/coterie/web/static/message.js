// One message: sender, time, content and delivery state.

import { button, fileIcon, fill, h, icon, setText } from './dom.js';
import { artifactUrl, post } from './api.js';
import { bytes, clockTime, dayAndTime, dayName, elapsed, t } from './i18n.js';
import { nodes } from './markdown.js';
import { copyText, oops } from './notices.js';
import { budgetOf, everySecond, nameOf, now, on, openQuestions, PERSON, state, SYSTEM, textOf, thread, threadOf, untilNext, usedWords } from './state.js';
import { quickReplies } from './quick_replies.js';

const DEEPEST = 3; // levels of nested keys that are shown
const ENDED_EARLY = { failed: 'replyBroken', withdrawn: 'replyWithdrawn' };
const KNOWN = new Set(['text', 'attachments', 'quickReplies', 'problem', 'approval', 'budget']);

export const who = (id) => (id === PERSON ? t('you') : id === SYSTEM ? t('system') : nameOf(id));

/** A stored message, or an unconfirmed one (`item.local`). `acts`: replyTo(id), goOn(), taskLine(message); retry, edit, drop for a local one. */
export function messageView(item, acts) {
  const first = of(item);
  const mine = first.from === PERSON;
  const head = h('div', { class: 'msg-head' });
  const body = h('div', { class: 'bubble', dir: 'auto' });
  const foot = h('div', { class: 'msg-foot meta' });
  const bubbleRow = h('div', { class: 'bubble-row' }, body);
  const el = h('article', { class: `msg ${mine ? 'msg-mine' : first.from === SYSTEM ? 'msg-system' : 'msg-theirs'}`, tabindex: '-1', data: { key: item.key } },
    h('div', { class: 'msg-box' }, head, bubbleRow, h('div', { class: 'msg-tail' }, foot)));
  if (first.id) {
    el.dataset.messageId = first.id;
    el.dataset.testid = 'message';
  }
  const options = first.id && quickReplies(first);
  if (options) el.firstChild.append(options.el);
  if (!mine && first.id && acts?.replyTo && first.from !== SYSTEM) {
    bubbleRow.append(button({ class: 'icon-btn msg-reply', 'aria-label': t('replyTo'), title: t('replyTo'), onclick: () => acts.replyTo(first.id) }, icon('reply')));
  }

  if (first.id && acts?.replyTo) {
    const more = button({ class: 'icon-btn msg-reply msg-more', 'aria-label': t('messageMenu'), title: t('messageMenu'), 'aria-haspopup': 'menu', 'data-testid': 'message-menu',
      onclick: () => import('./screens/message_menu.js').then((menu) => menu.openMessageMenu(more, of(last), el)) }, icon('more'));
    bubbleRow[mine ? 'prepend' : 'append'](more);
  }

  let shown = null;
  let parted = '';
  let last = item;
  let line = null; // what became of its task
  function update(next = last) {
    last = next;
    const message = of(next);
    const seams = [
      ['day', null, next.day && dayName(next.day)],
      ['news', 'new-line', next.news && (next.news === 1 ? t('newMessage') : t('newMessages', { n: next.news }))],
      ['broke', 'break', next.broke && brokeText(next.broke)],
    ].filter(([, , text]) => text);
    if (parted !== (parted = String(seams))) {
      while (el.children.length > 1) el.firstChild.remove();
      el.prepend(...seams.map(([kind, name, text]) => h('div', { class: kind, 'data-testid': name }, text)));
    }
    const name = mine ? t('you') : who(message.from);
    const time = message.deliveredAt ?? message.createdAt ?? message.at;
    el.classList.toggle('is-joined', Boolean(next.joined));
    el.setAttribute('aria-label', `${name} ${time ? clockTime(time) : ''}`);
    if (!head.firstChild) fill(head, h('span', { class: 'msg-name' }, name), message.to !== PERSON && !mine ? h('span', { class: 'meta' }, `→ ${who(message.to)}`) : null, h('time', { class: 'meta', datetime: time }, time ? clockTime(time) : ''));
    const text = JSON.stringify(message.payload);
    if (shown !== text) {
      shown = text;
      fill(body, content(message));
      body.hidden = !body.firstChild;
    }
    paintFoot(message);
    if (Boolean(line) !== Boolean(next.task && acts?.taskLine)) {
      line?.leave();
      line = line ? null : acts.taskLine(message, foot);
    }
    options?.update();
  }

  function paintFoot(message) {
    const time = mine && (message.deliveredAt ?? message.createdAt);
    const parts = time ? [clockTime(time)] : [];
    if (message.local) {
      const { status } = message;
      if (status === 'failed') {
        parts.push(h('span', { class: 'bad' }, t('failed')),
          button({ class: 'text-btn', 'data-testid': 'retry', onclick: () => acts.retry(message) }, t('retry')),
          button({ class: 'text-btn', onclick: () => acts.edit(message) }, t('edit')),
          button({ class: 'text-btn danger', onclick: () => acts.drop(message) }, t('remove')));
      } else parts.push(t(message.unsure ? 'unsure' : status === 'sending' ? 'sending' : 'delivered'));
    } else if (mine) parts.push(message.state === 'taken' ? t('taken') : message.state === 'delayed' ? t('scheduled', { time: dayAndTime(message.deliverAt) }) : t('delivered'));
    if (message.stopped) parts.push(h('span', { class: 'warn', 'data-testid': 'stopped' }, t('replyStopped')));
    if (message.cutOff) {
      parts.push(h('span', { class: 'warn', 'data-testid': 'cut-off' }, t(`cutOff_${message.cutOff}`)));
      if (acts?.goOn && isLast(message)) parts.push(button({ class: 'text-btn', 'data-testid': 'continue', onclick: () => acts.goOn() }, t('continue')));
    }
    if (message.via) parts.push(h('span', { 'data-testid': 'via' }, t('via', { key: message.via })));
    if (message.early) parts.push(t('early'));
    if (message.every) parts.push(t('recurs', { every: message.every }));
    if (message.missed) parts.push(h('span', { class: 'warn', 'data-testid': 'missed' }, t('missed', { n: message.missed })));
    const key = parts.map((part) => part.textContent ?? part).join('|');
    if (foot.dataset.key === key) return;
    foot.dataset.key = key;
    fill(foot, parts.map((part) => (typeof part === 'string' ? h('span', {}, part) : part)));
    el.dataset.state = message.local ? message.status : message.state;
  }

  update();
  const end = first.id && on([`message:${first.id}`, 'questions'], () => update());
  return {
    el,
    update,
    leave() {
      end?.();
      line?.leave();
      options?.leave();
    },
  };
}

/** True for the newest message of its thread, unless the person has written since. */
const isLast = (message) => thread(threadOf(message)).ids.at(-1) === message.id && ![...state.locals.values()].some((one) => one.to === message.from);
const of = (item) => item.local ?? state.messages.get(item.id);

function brokeText({ withdrawn }) {
  const cancelled = withdrawn > 1 ? t('callsCancelled', { n: withdrawn }) : withdrawn === 1 ? t('callCancelled') : '';
  return [t('interjectionsTaken'), cancelled].filter(Boolean).join(' · ');
}

/** The content of a message: text, files, and other fields as a card. */
function content(message) {
  const payload = message.payload ?? {};
  const parts = [];
  if (message.inReplyTo && message.from === PERSON && message.option === undefined) parts.push(quoted(message.inReplyTo));
  const text = textOf(message);
  if (text) {
    const tree = text === payload.text && message.rendered;
    parts.push(h('div', { class: 'md' }, tree?.length ? nodes(tree) : h('p', { class: 'as-typed' }, text)));
  }
  if (budgetOf(message)) parts.push(budgetFacts(message));
  const files = Array.isArray(payload.attachments) ? payload.attachments : [];
  if (files.length) parts.push(h('ul', { class: 'files' }, files.map(file)));
  if (payload.approval) parts.push(fields(payload.approval.arguments ?? {}));
  const more = Object.fromEntries(Object.entries(payload).filter(([key]) => !KNOWN.has(key)));
  if (Object.keys(more).length) parts.push(structured(more));
  return parts.filter(Boolean);
}

/** Who worked on a task that has used its budget, and what it used. */
export function budgetFacts(message) {
  const { task, agents, used, currency } = budgetOf(message);
  return h('div', { class: 'fields', 'data-testid': 'budget' },
    h('dl', { class: 'pairs' }, agents.length > 0 && [h('dt', {}, t('taskWorked')), h('dd', { dir: 'auto' }, agents.join(', '))], h('dt', {}, t('taskUsed')), h('dd', {}, usedWords(used, currency))),
    h('a', { href: `#/tasks/${encodeURIComponent(task)}` }, t('taskOpen')));
}

function quoted(id) {
  const original = state.messages.get(id);
  const text = original && String(original.payload?.text ?? '').slice(0, 120);
  return text ? h('p', { class: 'quoted' }, text) : null;
}

function file(one) {
  const { artifactRef: ref, filename = '', type, size } = one ?? {};
  if (typeof ref !== 'string') return null;
  const label = h('span', { class: 'file-name' }, filename || ref);
  const weight = typeof size === 'number' ? h('span', { class: 'meta' }, bytes(size)) : null;
  if (type === 'image') {
    const open = (event) => {
      event.preventDefault();
      import('./screens/parts.js').then((parts) => parts.openImage(one));
    };
    return h('li', { class: 'file file-image' }, h('a', { href: artifactUrl(ref), 'aria-label': t('enlarge', { name: filename }), onclick: open },
      h('img', { src: artifactUrl(ref), alt: filename, loading: 'lazy', decoding: 'async' })), h('span', { class: 'file-line' }, label, weight));
  }
  return h('li', { class: 'file' }, fileIcon(type),
    h('a', { class: 'file-name', href: artifactUrl(ref), download: filename, 'aria-label': t('download', { name: filename }) }, filename || ref), weight);
}

/** A table of keys and values, with the JSON on demand. */
function structured(value) {
  return h('div', { class: 'fields', role: 'group', 'aria-label': t('fields') }, fields(value),
    h('details', {}, h('summary', {}, t('rawJson')), h('pre', { tabindex: '0' }, JSON.stringify(value, null, 2))));
}

function fields(value, depth = 0) {
  const shown = (one) => (one === null || typeof one !== 'object' ? String(one) : depth < DEEPEST ? fields(one, depth + 1) : JSON.stringify(one));
  return h('dl', { class: 'pairs' }, Object.entries(value).map(([key, one]) => [h('dt', {}, key), h('dd', { dir: 'auto' }, shown(one))]));
}

/** A reply in progress, as plain text. Repainted every `pace()` milliseconds; shows the last `most` characters. */
export function draftView(item, pace, most = Infinity) {
  const draft = () => state.drafts.get(item.id);
  const text = document.createTextNode('');
  const foot = h('div', { class: 'msg-foot meta' });
  const el = h('article', { class: 'msg msg-theirs msg-draft', tabindex: '-1', 'data-testid': 'draft', 'aria-label': `${nameOf(draft().agent)} ${t('streaming')}` },
    h('div', { class: 'msg-box' }, h('div', { class: 'msg-head' }, h('span', { class: 'msg-name' }, nameOf(draft().agent)), h('span', { class: 'tag tag-live' }, t('streaming'))),
      h('div', { class: 'bubble-row' }, h('div', { class: 'bubble', dir: 'auto' }, h('p', { class: 'as-typed' }, text, h('span', { class: 'caret', 'aria-hidden': 'true' })))), foot));
  let timer = null;

  function paint() {
    timer = null;
    const now = draft();
    if (!now) return;
    const all = now.text.length > most ? `…${now.text.slice(-most)}` : now.text;
    if (all.startsWith(text.data)) text.appendData(all.slice(text.data.length));
    else text.data = all;
    el.classList.toggle('is-stopped', Boolean(now.stopped));
    if (now.stopped && !foot.firstChild) {
      foot.append(h('span', { class: 'warn', 'data-testid': 'stopped' }, t(ENDED_EARLY[now.outcome] ?? 'replyStopped')));
      el.querySelector('.tag-live').remove();
    }
  }

  const soon = () => {
    timer ??= setTimeout(paint, untilNext(pace()));
  };
  const end = on(`draft:${item.id}`, soon);
  paint();
  return {
    el,
    update() {},
    leave() {
      end();
      clearTimeout(timer);
    },
  };
}

/** What an agent said before a message of the person ended its answer. Its model does not see it again. */
export function withdrawnView(item) {
  const day = h('div', { class: 'day', hidden: true });
  const el = h('article', { class: 'msg msg-theirs msg-withdrawn', tabindex: '-1', 'data-testid': 'withdrawn', 'aria-label': `${nameOf(item.from)} ${clockTime(item.at)} ${t('replyWithdrawn')}` }, day,
    h('div', { class: 'msg-box' }, h('div', { class: 'msg-head' }, h('span', { class: 'msg-name' }, nameOf(item.from)), h('time', { class: 'meta', datetime: item.at }, clockTime(item.at))),
      h('div', { class: 'bubble-row' }, h('div', { class: 'bubble', dir: 'auto' }, h('p', { class: 'as-typed' }, item.text))),
      h('div', { class: 'msg-foot meta' }, h('span', {}, t('replyWithdrawn')))));

  function update(next) {
    day.hidden = !next.day;
    if (next.day) setText(day, dayName(next.day));
  }
  update(item);
  return { el, update, leave() {} };
}

// Only the event has a category. A page that was opened later knows only the reason.
const isOverBudget = (id) => (state.problems.get(id)?.category ?? (/ used its budget/.test(state.agents.get(id)?.why) && 'budget')) === 'budget';

/** True if the problem of an agent is that a task has used its budget, and the question about it is in the same conversation. */
export const asksAboutBudget = (id) => isOverBudget(id) && openQuestions(id).some(budgetOf);

/** Why an agent is blocked or waits for a retry, and what to do. */
export function problemView(id) {
  const words = h('p', { class: 'problem-what' });
  const detail = h('p', { class: 'problem-why', dir: 'auto' });
  const when = h('p', { class: 'meta num' });
  const again = button({ class: 'plain-btn', 'data-testid': 'problem-retry', onclick: () => post(`/agents/${encodeURIComponent(id)}/resume`).catch((error) => oops(error)) }, t('retry'));
  const setup = h('a', { class: 'text-btn', href: '#/setup' }, t('setup'));
  const tasks = h('a', { class: 'text-btn', href: '#/tasks?state=waiting' }, t('tasks'));
  const copying = button({ class: 'text-btn', onclick: () => copyText(detail.textContent) }, t('copy'));
  const more = h('details', {}, h('summary', {}, t('details')), detail, copying);
  const el = h('article', { class: 'msg msg-problem', tabindex: '-1', 'data-testid': 'problem', data: { key: 'problem' } },
    h('div', { class: 'problem' }, words, more, when, h('div', { class: 'problem-acts' }, again, setup, tasks)));

  function update() {
    const told = state.problems.get(id);
    const one = state.agents.get(id);
    const over = isOverBudget(id);
    const key = `problem_${over ? 'budget' : told?.category}`;
    const why = told?.message ?? one?.why;
    setText(detail, why ?? '');
    setText(words, t(key) !== key ? t(key) : why || t('problem_other'));
    more.hidden = words.textContent === why;
    setup.hidden = over || (told && told.category !== 'auth');
    again.hidden = over;
    tasks.hidden = !over;
    tick();
  }
  function tick() {
    const at = state.problems.get(id)?.retryAt;
    const retries = state.agents.get(id)?.phase === 'retry';
    setText(when, isOverBudget(id) ? '' : at ? t('problemRetryIn', { time: elapsed(Date.parse(at) - now()) }) : t(retries ? 'phase_retry' : 'problemHow'));
  }
  update();
  return { el, update, leave: everySecond(tick) };
}
