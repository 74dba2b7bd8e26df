// One message: sender, time, content and delivery state.

import { avatar, button, fileIcon, fill, h, icon, setText } from './dom.js';
import { artifactUrl, post } from './api.js';
import { bytes, clockTime, dayAndTime, dayName, elapsed, recurrence, t } from './i18n.js';
import { growing, nodes } from './markdown.js';
import { copyText, oops } from './notices.js';
import { approvalOf, budgetOf, everySecond, nameOf, now, on, openQuestions, PERSON, plainText, problemText, state, SYSTEM, textOf, thread, threadOf, undeliveredText, unmarked, untilNext, usedWords } from './state.js';
import { quickReplies } from './quick_replies.js';

const DEEPEST = 3; // levels of nested keys that are shown
const ENDED_EARLY = { failed: 'replyBroken', withdrawn: 'replyWithdrawn' };
const NEEDS_SETUP = new Set(['auth', 'quota', 'model', 'request', 'malformed', 'network', 'no_service', 'no_agent']);
export const MARKDOWN = /^text\/markdown|\.(md|markdown)$/i; // of a type and a name
const KNOWN = new Set(['text', 'attachments', 'quickReplies', 'problem', 'approval', 'budget', 'translations']);

const face = (id) => state.agents.has(id) && avatar(state.agents.get(id), { size: 'small' });
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
    bubbleRow[mine ? 'prepend' : 'append'](menuButton(() => of(last), el));
  }

  let shown = null;
  let parted = '';
  let last = item;
  let line = null; // what became of its task
  function update(next = last) {
    last = next;
    const message = of(next);
    if (!message) return; // it has just been removed
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
    if (!head.firstChild) fill(head, !mine && face(message.from), h('span', { class: 'msg-name' }, name), message.to !== PERSON && !mine ? h('span', { class: 'meta' }, `→ ${who(message.to)}`) : null, h('time', { class: 'meta', datetime: time }, time ? clockTime(time) : ''));
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
    } else if (message.state === 'dead') parts.push(h('span', { class: 'bad', 'data-testid': 'undelivered' }, t('state_dead')));
    else if (mine) parts.push(message.state === 'taken' ? t('taken') : message.state === 'delayed' ? t('scheduled', { time: dayAndTime(message.deliverAt) }) : t('delivered'));
    if (message.stopped) parts.push(h('span', { class: 'warn', 'data-testid': 'stopped' }, t(message.payload.text ? 'replyStopped' : 'replyStoppedEarly')));
    if (message.cutOff) {
      parts.push(h('span', { class: 'warn', 'data-testid': 'cut-off' }, t(`cutOff_${message.cutOff}`)));
      if (acts?.goOn && isLast(message)) parts.push(button({ class: 'text-btn', 'data-testid': 'continue', onclick: () => acts.goOn() }, t('continue')));
    }
    if (message.via) parts.push(h('span', { 'data-testid': 'via' }, t('via', { key: message.via })));
    if (message.early) parts.push(t('early'));
    if (message.every) parts.push(t('recurs', { every: recurrence(message.every) }));
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

/** The button that opens the menu of a message. `el`: the shown message. */
function menuButton(message, el) {
  const more = button({ class: 'icon-btn msg-reply msg-more', 'aria-label': t('messageMenu'), title: t('messageMenu'), 'aria-haspopup': 'menu', 'data-testid': 'message-menu',
    onclick: () => import('./screens/message_menu.js').then((menu) => menu.openMessageMenu(more, message(), el)) }, icon('more'));
  return more;
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
  const isUndelivered = undeliveredText(message) !== undefined; // its text says all that the notice does
  if (message.from === SYSTEM && text !== payload.text && !isUndelivered) parts.push(h('details', { class: 'problem-more' }, h('summary', {}, t('details')), h('p', { class: 'problem-why' }, String(payload.text ?? ''))));
  if (budgetOf(message)) parts.push(budgetFacts(message));
  parts.push(fileList(message));
  if (approvalOf(message)) parts.push(approvalFacts(message));
  const more = Object.fromEntries(Object.entries(payload).filter(([key]) => !KNOWN.has(key) && !(isUndelivered && key === 'notice')));
  if (Object.keys(more).length) parts.push(structured(more));
  return parts.filter(Boolean);
}

// Arguments that decide whether a person agrees come first: how much, to whom, what is run or deleted.
const WEIGHTY = [/amount|sum|total|price|cost|value|quantity|金额|数量/i, /currency|币/i, /^to$|recipient|payee|receiver|beneficiary|account|iban|e-?mail|address|customer|user|收款|收件/i, /command|code|query|sql|url|path|file|name|subject|id$/i];
const weight = (key) => (WEIGHTY.findIndex((one) => one.test(key)) + WEIGHTY.length + 1) % (WEIGHTY.length + 1);
/** The weight of an argument: its own, or that of the weightiest value in it. */
const weightOf = ([key, value]) => Math.min(weight(key), ...(isNested(value) ? Object.entries(value).map(weightOf) : []));
const byWeight = (entries) => entries.sort((a, b) => weightOf(a) - weightOf(b));
const isNested = (one) => one !== null && typeof one === 'object';

/** What a tool call that waits for approval would do: its arguments, the most important first. */
export function approvalFacts(message) {
  const { given } = approvalOf(message);
  return h('div', { class: 'facts', 'data-testid': 'approval' }, Object.keys(given).length ? fields(given, { order: byWeight, deepest: Infinity }) : h('p', { class: 'meta' }, t('noArguments')));
}

/** Who worked on a task that has used its budget, and what it used. */
export function budgetFacts(message) {
  const { task, agents, used, currency } = budgetOf(message);
  const words = h('dd', {}, usedWords(used, currency));
  if (used.cost > 0 && !currency) {
    // The question may come before the news of its task, which has the currency.
    const stop = on(`task:${task}`, () => {
      stop();
      setText(words, usedWords(used, budgetOf(message).currency));
    });
  }
  return h('div', { class: 'fields', 'data-testid': 'budget' },
    h('dl', { class: 'pairs' }, agents.length > 0 && [h('dt', {}, t('taskWorked')), h('dd', { dir: 'auto' }, agents.join(t('comma')))], h('dt', {}, t('taskUsed')), words),
    h('a', { href: `#/tasks/${encodeURIComponent(task)}` }, t('taskOpen')));
}

function quoted(id) {
  const original = state.messages.get(id);
  const text = original && plainText(original).slice(0, 120);
  return text ? h('p', { class: 'quoted' }, text) : null;
}

/** The files of a message, or null. */
export function fileList({ payload }) {
  const files = Array.isArray(payload?.attachments) ? payload.attachments : [];
  return files.length ? h('ul', { class: 'files' }, files.map(file)) : null;
}

function file(one) {
  const { artifactRef: ref, filename = '', mimeType = '', type, size } = one ?? {};
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
  const where = MARKDOWN.test(`${mimeType} ${filename}`) ? { href: `#/artifacts/${encodeURIComponent(ref)}` } : { href: artifactUrl(ref), download: filename, 'aria-label': t('download', { name: filename }) };
  return h('li', { class: 'file' }, fileIcon(type), h('a', { class: 'file-name', ...where }, filename || ref), weight);
}

/** A table of keys and values, with the JSON on demand. */
function structured(value) {
  return h('div', { class: 'fields', role: 'group', 'aria-label': t('fields') }, fields(value),
    h('details', {}, h('summary', {}, t('rawJson')), h('pre', { tabindex: '0' }, JSON.stringify(value, null, 2))));
}

/** Keys and values as a table, lists as lists. `order` sorts the keys of each object. */
function fields(value, { order = (entries) => entries, deepest = DEEPEST } = {}) {
  const shown = (one, depth) => {
    if (!isNested(one) || depth > deepest) return isNested(one) ? JSON.stringify(one) : String(one);
    if (!Object.keys(one).length) return '–';
    if (Array.isArray(one)) return h('ol', { class: 'pairs-list' }, one.map((each) => h('li', { dir: 'auto' }, shown(each, depth + 1))));
    return h('dl', { class: 'pairs' }, order(Object.entries(one)).map(([key, each]) => [h('dt', {}, key), h('dd', { dir: 'auto' }, shown(each, depth + 1))]));
  };
  return shown(value, 0);
}

/** A reply in progress. Repainted every `pace()` milliseconds. With `most`: the last characters of it as plain text. */
export function draftView(item, pace, most = Infinity) {
  const draft = () => state.drafts.get(item.id);
  const text = document.createTextNode('');
  const words = most === Infinity ? growing() : null;
  const foot = h('div', { class: 'msg-foot meta' });
  const live = h('span', { class: 'tag tag-live' }, t('streaming'));
  const body = words ? words.el : h('p', { class: 'as-typed' }, text, h('span', { class: 'caret', 'aria-hidden': 'true' }));
  const el = h('article', { class: 'msg msg-theirs msg-draft', tabindex: '-1', 'data-testid': 'draft', 'aria-label': `${nameOf(draft().agent)} ${t('streaming')}` },
    h('div', { class: 'msg-box' }, h('div', { class: 'msg-head' }, face(draft().agent), h('span', { class: 'msg-name' }, nameOf(draft().agent)), live),
      h('div', { class: 'bubble-row' }, h('div', { class: 'bubble', dir: 'auto' }, body)), foot));
  let timer = null;

  function paint() {
    timer = null;
    const now = draft();
    if (!now) return;
    if (words) words.push(now.text);
    else text.data = now.text.length > most ? `…${unmarked(now.text.slice(-most))}` : unmarked(now.text);
    live.hidden = Boolean(now.stopped);
    el.classList.toggle('is-stopped', live.hidden);
    if (live.hidden !== foot.hasChildNodes()) fill(foot, live.hidden && h('span', { class: 'warn', 'data-testid': 'stopped' }, t(ENDED_EARLY[now.outcome] ?? 'replyStopped')));
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
      words?.end();
      clearTimeout(timer);
    },
  };
}

/** What an agent said before a tool call, or before a message of the person ended its answer. */
export function spokenView(item) {
  const day = h('div', { class: 'day', hidden: true });
  const gone = item.kind === 'withdrawn';
  const name = `${nameOf(item.from)} ${clockTime(item.at)}`;
  const { id, payload: { text }, rendered } = item.said;
  const row = h('div', { class: 'bubble-row' }, h('div', { class: 'bubble', dir: 'auto' }, h('div', { class: 'md' }, rendered?.length ? nodes(rendered) : h('p', { class: 'as-typed' }, text))));
  const el = h('article', { class: `msg msg-theirs ${gone ? 'msg-withdrawn' : 'msg-said'}`, tabindex: '-1', data: { said: id }, 'data-testid': item.kind, 'aria-label': gone ? `${name} ${t('replyWithdrawn')}` : name }, day,
    h('div', { class: 'msg-box' }, h('div', { class: 'msg-head' }, face(item.from), h('span', { class: 'msg-name' }, nameOf(item.from)), h('time', { class: 'meta', datetime: item.at }, clockTime(item.at))),
      row, gone && h('div', { class: 'msg-foot meta' }, h('span', {}, t('replyWithdrawn')))));

  row.append(menuButton(() => item.said, el));

  function update(next) {
    day.hidden = !next.day;
    if (next.day) setText(day, dayName(next.day));
    el.classList.toggle('is-joined', Boolean(next.joined));
  }
  update(item);
  return { el, update, leave() {} };
}

const isOverBudget = (id) => state.agents.get(id)?.problem?.category === 'budget';

/** True if the problem of an agent is that a task has used its budget, and the question about it is in the same conversation. */
export const asksAboutBudget = (id) => isOverBudget(id) && openQuestions(id).some(budgetOf);

/** Why an agent is blocked or waits for a retry, and what to do. */
export function problemView(id) {
  const words = h('p', { class: 'problem-what', dir: 'auto' });
  const detail = h('p', { class: 'problem-why', dir: 'auto' });
  const when = h('p', { class: 'meta num' });
  const again = button({ class: 'plain-btn', 'data-testid': 'problem-retry', onclick: () => post(`/agents/${encodeURIComponent(id)}/resume`).catch((error) => oops(error)) }, t('retry'));
  const setup = h('a', { class: 'text-btn', href: '#/setup' }, t('fixIt'));
  const tasks = h('a', { class: 'text-btn', href: '#/tasks?state=waiting' }, t('tasks'));
  const copying = button({ class: 'text-btn', onclick: () => copyText(detail.textContent) }, t('copy'));
  const more = h('details', {}, h('summary', {}, t('details')), detail, copying);
  const el = h('article', { class: 'msg msg-problem', tabindex: '-1', 'data-testid': 'problem', data: { key: 'problem' } },
    h('div', { class: 'problem' }, words, more, when, h('div', { class: 'problem-acts' }, again, setup, tasks)));

  function update() {
    const { problem, why = '' } = state.agents.get(id) ?? {};
    const over = isOverBudget(id);
    setText(detail, why);
    setText(words, problem ? problemText(problem) : why || t('problem_other'));
    more.hidden = !why || words.textContent === why;
    setup.hidden = over || (problem && !NEEDS_SETUP.has(problem.category));
    again.hidden = over;
    tasks.hidden = !over;
    tick();
  }
  function tick() {
    const { problem, phase } = state.agents.get(id) ?? {};
    const at = problem?.retryAt;
    setText(when, isOverBudget(id) ? '' : at ? t('problemRetryIn', { time: elapsed(Date.parse(at) - now()) }) : t(phase === 'retry' ? 'phase_retry' : 'problemHow'));
  }
  update();
  return { el, update, leave: everySecond(tick) };
}
