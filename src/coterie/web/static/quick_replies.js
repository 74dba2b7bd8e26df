// Quick replies under a message. They close only when the server has an answer; the page itself adds the state `sending`.

import { button, h, setAttr, setText, toComposer } from './dom.js';
import { newId, send } from './api.js';
import { t } from './i18n.js';
import { toast } from './notices.js';
import { small } from './shell.js';
import { approvalOf, isOpen, keep, on, openQuestions, optionSent, optionsOf, optionWords, PERSON, state, touch } from './state.js';

const SHORT = 8; // full-width characters that fit half the width of a phone

/** The options as a toolbar, or as plain chips if the person cannot choose; null if there are none. */
export function quickReplies(message) {
  const options = optionsOf(message) && optionWords(message);
  if (!options) return null;
  if (message.to !== PERSON) {
    return { el: h('ul', { class: 'quick-chips', 'aria-label': t('quickReplies') }, options.map((one) => h('li', { dir: 'auto' }, one))), update() {}, leave() {} };
  }
  return toolbar(message, options);
}

function toolbar(message, options) {
  const lineId = `qr-${message.id}`;
  const approval = approvalOf(message);
  const buttons = options.map((text, index) =>
    button({ class: `quick-reply-btn ${approval ? ['qr-approve', 'qr-deny'][index] : ''}`, dir: 'auto', tabindex: '-1', 'aria-label': text, data: { index } }, h('span', { class: 'qr-text' }, text)));
  const short = options.every((one) => width(one) <= SHORT);
  const bar = h('div', { class: `quick-replies ${short ? 'qr-short' : ''}`, role: 'toolbar', 'aria-label': t('quickReplies'), 'aria-describedby': lineId,
    data: { messageId: message.id }, onclick: clicked, onkeydown: keys, onfocusin: (event) => rove(index(event.target)), onfocusout: () => queueMicrotask(update) }, buttons);
  const line = h('p', { class: 'qr-line meta', id: lineId });
  const toggle = button({ class: 'text-btn', hidden: true, onclick: () => {
    bar.classList.toggle('qr-full');
    setText(toggle, t(bar.classList.contains('qr-full') ? 'qrShort' : 'qrFull'));
  } }, t('qrFull'));
  const el = h('div', { class: 'qr' }, bar, toggle, line);
  let current = 0;

  const now = () => state.messages.get(message.id) ?? message;
  const gone = () => state.agents.get(message.from)?.state === 'terminated';
  const index = (target) => buttons.indexOf(target.closest('.quick-reply-btn'));

  function update() {
    const one = now();
    const open = isOpen(one) && !gone();
    const onWay = state.sending.get(one.id);
    const chosen = onWay ? onWay.option : one.answer?.option ?? null;
    const focused = bar.contains(document.activeElement);
    buttons.forEach((each, at) => {
      setAttr(each, 'aria-disabled', open ? null : 'true');
      setAttr(each, 'aria-pressed', at === chosen ? 'true' : null);
      each.tabIndex = (open || focused) && at === current ? 0 : -1;
    });
    bar.classList.toggle('is-open', open);
    bar.classList.toggle('is-answered', Boolean(one.answer) && !one.answer.closed); // only the chosen option stays
    setAttr(bar, 'aria-orientation', small.matches && !short ? 'vertical' : 'horizontal');
    setText(line, said(one, onWay, open));
  }

  function said(one, onWay, open) {
    if (onWay?.unsure) return t('unsure');
    if (onWay) return t('qrSending');
    if (one.answer?.closed) return t('qrClosed');
    if (one.answer && approval) return t(['approved', 'denied'][one.answer.option] ?? 'approvalWithdrawn');
    if (one.answer) return one.answer.option === null || one.answer.option === undefined ? t('qrCustom') : t('qrChosen', { n: one.answer.option + 1 });
    return open || !gone() ? '' : t('qrTerminated');
  }

  function rove(to) {
    if (to < 0) return;
    current = to;
    update();
  }

  function clicked(event) {
    const at = index(event.target);
    if (at < 0 || !isOpen(now()) || gone()) return;
    buttons[at].focus({ preventScroll: true });
    choose(now(), at);
    update();
  }

  function keys(event) {
    const at = index(event.target);
    if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const last = buttons.length - 1;
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const to = step ? (at + step + buttons.length) % buttons.length : { Home: 0, End: last }[event.key];
    if (to !== undefined) {
      rove(to);
      buttons[to].focus();
    } else if (/^[0-9]$/.test(event.key)) {
      const picked = buttons[(Number(event.key) + 9) % 10];
      if (!event.repeat) {
        if (!picked || !isOpen(now()) || gone()) return; // it is text for the composer
        picked.focus();
        picked.click();
      }
    } else if (event.key === 'Escape') toComposer();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  requestAnimationFrame(() => {
    toggle.hidden = !buttons.some((each) => each.firstChild.scrollHeight > each.firstChild.clientHeight + 1);
  });
  update();
  const end = on(`agent:${message.from}`, update);
  small.addEventListener('change', update);
  return {
    el,
    update,
    leave() {
      end();
      small.removeEventListener('change', update);
    },
  };
}

/** Width of a text in full-width characters. */
function width(text) {
  let sum = 0;
  for (const sign of text.trim()) sum += sign.codePointAt(0) > 0x2e7f ? 1 : 0.5;
  return sum;
}

// Answering

const kept = (id, option) => `coterie.answer.${id}.${option}`;

function nameFor(id, option) {
  try {
    const known = sessionStorage.getItem(kept(id, option)) ?? newId();
    sessionStorage.setItem(kept(id, option), known);
    return known;
  } catch {
    return newId();
  }
}

async function choose(question, option) {
  if (!isOpen(question)) return;
  const clientId = nameFor(question.id, option);
  const text = optionSent(question, option);
  const mine = { option, clientId };
  state.sending.set(question.id, mine);
  touch(`message:${question.id}`);
  const unsure = () => {
    mine.unsure = true;
    touch(`message:${question.id}`);
  };
  try {
    const receipt = await send({ clientId, to: question.from, payload: { text }, inReplyTo: question.id, option }, unsure);
    close(question, { messageId: receipt.messageId, option });
  } catch (error) {
    refused(question, option, error);
  }
}

function close(question, answer) {
  // The clientId is used: the same option chosen after a withdrawal must be a new message.
  for (const option of optionsOf(question).keys()) sessionStorage.removeItem(kept(question.id, option));
  state.sending.delete(question.id);
  keep({ id: question.id, answer });
  state.questions.delete(question.id);
  touch('questions', `message:${question.id}`);
}

function refused(question, option, error) {
  const winner = error.more?.answer;
  if (error.code === 'already_answered') {
    close(question, winner ?? { messageId: '', option: null });
    toast({ text: t('qrElsewhere') });
    return;
  }
  state.sending.delete(question.id);
  if (error.status === 410 || error.code === 'unknown_recipient') {
    const agent = state.agents.get(question.from);
    if (agent) agent.state = 'terminated';
    touch(`agent:${question.from}`, 'agents');
  } else toast({ kind: 'error', text: t('qrFailed', { option: optionWords(question)[option] }), retry: () => choose(question, option) });
  touch(`message:${question.id}`, 'questions');
}

/** Focuses the newest open quick replies of the conversation. */
export function focusNewest(showMessage) {
  const newest = openQuestions().filter(isOpen).sort((a, b) => (a.deliveredAt < b.deliveredAt ? 1 : -1)).find((one) => showMessage(one));
  const bar = newest && document.querySelector(`.quick-replies[data-message-id="${CSS.escape(newest.id)}"]`);
  bar?.querySelector('.quick-reply-btn')?.focus();
  return Boolean(bar);
}
