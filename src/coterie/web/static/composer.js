// The composer. Typed text is never lost: it is sent, kept as a draft, or restored.

import { button, fill, flag, h, icon, iconButton, setAttr, setText } from './dom.js';
import { stop, stopping } from './agents_list.js';
import { newId, send } from './api.js';
import { dayAndTime, reasonOf, t } from './i18n.js';
import { toast } from './notices.js';
import { approvalOf, confirmLocal, dropLocal, holders, isOpen, keptAs, localOf, now, on, openQuestions, plainText, putLocal, state, textOf, touch } from './state.js';
import { agentPath, go } from './router.js';
import { small, takeEarly } from './shell.js';
import { mountStrip, waitingFor, withdraw } from './waiting.js';

const LONGEST = 200_000;
const LONG_PASTE = 20_000; // characters; a longer text is attached instead of inserted
const MOST_LINES = 2_000; // a text with more lines would freeze the page while it is laid out
const hasManyLines = (words) => words.split('\n', MOST_LINES + 1).length > MOST_LINES;
const handedTo = new Set(); // agents whose next composer gets moved files, or files that were not uploaded when it was left
const intended = new Map(); // agent -> {plan, isUndecided}: its draft is to be sent when its uploads end, but its composer was left
let shown = null; // the composer that is shown: {agent, refill, add, attach, focus}
const kept = (agent) => `coterie.draft.${agent}`;

let isShown = null; // while the page is left: a promise that it returns from the browser's cache
addEventListener('pagehide', () => {
  isShown = new Promise((resolve) => addEventListener('pageshow', resolve, { once: true }));
});

/** Shows the composer of one agent; '' until the agents are loaded. Returns `{leave, replyTo, refill, add, focus}`. */
export function mountComposer(root, agent) {
  const early = takeEarly();
  if (early?.text) addToDraft(agent, early.text);
  const unaddressed = agent && readDraft('');
  if (unaddressed) {
    addToDraft(agent, unaddressed.text, unaddressed.files);
    localStorage.removeItem(kept(''));
  }
  const draft = { text: '', files: [], replyTo: null, ...readDraft(agent) };
  let tray = null; // attachments; the module is loaded for the first file
  let composedAt = -1;
  let waitingPlan = null; // of a message whose files are not uploaded yet
  let intent = intended.get(agent); // until the tray is loaded
  intended.delete(agent);
  let known = packed(draft); // what the storage has, as far as this composer knows
  let isMine = false; // the stored draft was written here
  let closePasted = () => {}; // closes the notice that offers to insert the pasted text: only this composer can
  let left = false; // it neither sends nor stores its draft: the same agent may have a new composer

  const strip = h('div', { class: 'strip', role: 'region', 'aria-label': t('strip') });
  const note = h('div', { class: 'composer-note' });
  const chips = h('div', { class: 'composer-files' });
  const text = h('textarea', { class: 'composer-text', id: 'composer', rows: '1', dir: 'auto', 'data-testid': 'composer', 'aria-describedby': 'composer-hint', enterkeyhint: 'send' });
  const hint = h('p', { class: 'composer-hint meta', id: 'composer-hint' });
  const undecided = h('input', { type: 'checkbox', checked: true, 'data-testid': 'ask-back', onchange: () => {
    paint();
    text.focus();
  } });
  const choice = h('label', { class: 'ask-back' }, undecided, t('askBack'));
  const picker = h('input', { type: 'file', multiple: true, hidden: true, 'data-testid': 'file-input', onchange: () => {
    attach([...picker.files]);
    picker.value = '';
  } });
  // One button for both, so that the focus stays on it when Send becomes Stop and back.
  const sender = button({ class: 'primary send-btn', 'data-testid': 'send', type: 'submit', onclick: (event) => {
    const isRepeated = event.detail > 1; // a double click sends: it must not stop the agent
    if (!isRepeated && !stops()) return;
    event.preventDefault();
    if (!isRepeated) stop(agent);
  }, onkeydown: (event) => {
    if (event.repeat && event.key === 'Enter') event.preventDefault();
  } });
  const clock = iconButton('clock', t('sendLater'), { class: 'later-btn', 'data-testid': 'send-later', onclick: later });
  const form = h('form', { class: 'composer', onsubmit: (event) => {
    event.preventDefault();
    submit();
  } }, note, chips, h('div', { class: 'composer-row' }, iconButton('plus', t('attach'), { class: 'attach-btn', 'data-testid': 'attach', onclick: () => picker.click() }), text, clock, sender), h('div', { class: 'composer-foot' }, hint, choice), picker);
  fill(root, strip, form);
  root.hidden = false;

  // Writing

  text.value = draft.text;
  if (early?.focused) text.focus();
  text.addEventListener('input', changed);
  text.addEventListener('compositionend', () => {
    composedAt = performance.now();
  });
  text.addEventListener('keydown', (event) => {
    if (event.key === 'ArrowUp' && !text.value && !event.shiftKey && !event.altKey && !event.isComposing) return editLast(event);
    if (event.key === 'Escape' && draft.replyTo) return replyTo(null);
    if (event.key !== 'Enter' || event.shiftKey || event.altKey) return;
    // Enter that ends an IME composition does not send; Safari fires compositionend before keydown.
    if (event.isComposing || event.keyCode === 229 || performance.now() - composedAt < 20) return;
    const mod = event.ctrlKey || event.metaKey;
    if (flag('ctrlEnterSends') !== mod) return;
    event.preventDefault();
    if (!event.repeat) submit();
  });
  text.addEventListener('paste', (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    const words = files.length ? '' : event.clipboardData?.getData('text/plain') ?? '';
    if (!files.length && words.length <= LONG_PASTE && !hasManyLines(words)) return;
    event.preventDefault();
    if (files.length) attach(files);
    else attachText(words);
  });

  /** A text that is too long to read in the box becomes a file. Short enough ones can still be inserted. */
  async function attachText(words) {
    const file = new File([words], t('pastedName'), { type: 'text/plain' });
    await attach([file]);
    const insert = words.length <= LONGEST && !hasManyLines(words) && (() => {
      tray.drop(file);
      text.setRangeText(words, text.selectionStart, text.selectionEnd, 'end');
      changed();
      text.focus();
    });
    if (!left) closePasted = toast({ text: t('pastedLong'), retry: insert || undefined, label: t('pasteAsText') });
  }

  function changed() {
    draft.text = text.value;
    keepDraft();
    size();
    paint();
  }

  function size() {
    if (CSS.supports('field-sizing', 'content')) return;
    text.style.height = 'auto';
    text.style.height = `${Math.min(text.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  function keepDraft() {
    const mine = { ...draft, files: filesReady() };
    if (left || packed(mine) === known) return; // another tab may have stored a newer draft
    known = packed(mine);
    isMine = Boolean(known);
    if (isMine) storeDraft(agent, mine);
    else localStorage.removeItem(kept(agent));
  }

  /** Shows the draft of another tab, unless this one has its own. */
  function follow({ key }) {
    if (key !== kept(agent) || isMine || tray?.busy()) return;
    Object.assign(draft, { text: '', files: [], replyTo: null }, readDraft(agent));
    known = packed(draft);
    text.value = draft.text;
    tray?.clear();
    if (draft.files.length) loadTray();
    size();
    paint();
  }

  function paint() {
    const one = state.agents.get(agent);
    const name = one?.name || agent;
    const gone = one?.state === 'terminated' || Boolean(one?.retired);
    const over = [...text.value].length - LONGEST;
    const question = asksApproval(agent);
    choice.hidden = gone || !question;
    undecided.disabled = Boolean(draft.replyTo) && draft.replyTo !== question?.id;
    text.disabled = gone;
    sender.disabled = gone;
    setAttr(text, 'aria-label', t('writeTo', { name }));
    text.placeholder = gone ? '' : t(one?.state === 'active' && !small.matches ? 'writeToActive' : 'writeTo', { name });
    setAttr(sender, 'aria-disabled', (stops() ? !stopping.has(one) : !gone && sendable()) ? null : 'true');
    setAttr(clock, 'aria-disabled', !gone && sendable() ? null : 'true');
    paintSender(name);
    setText(hint, gone ? t(one.retired ? 'agentRetired' : 'recipientGone', { name }) : over > 0 ? t('tooLong', { n: over }) : tray?.waits ? t('waitsForUploads') : question ? t(asksBack() ? 'hintAskBack' : 'hintApproval', { name, tool: approvalOf(question).tool }) : one?.state === 'active' ? t('hintActive', { name }) : '');
    hint.classList.toggle('bad', over > 0);
    const to = draft.replyTo && state.messages.get(draft.replyTo);
    fill(note, to ? [h('span', { class: 'note-text' }, t('replyingTo', { text: plainText(to).slice(0, 100) })), iconButton('close', t('cancel'), { onclick: () => replyTo(null) })] : []);
  }

  /** The id of the approval question that the text is about, if the person only asks and does not decide. */
  function asksBack() {
    const question = asksApproval(agent);
    return question && undecided.checked && !undecided.disabled ? question.id : null;
  }

  /** True while the button stops the agent: it works, and nothing is written that could be sent. */
  const stops = () => state.agents.get(agent)?.state === 'active' && !sendable();

  function paintSender(name) {
    const mode = !stops() ? 'send' : stopping.has(state.agents.get(agent)) ? 'stopping' : 'stop';
    setAttr(sender, 'aria-label', mode === 'send' ? t('send') : mode === 'stop' ? t('stopAgent', { name }) : t('stopping'));
    if (sender.dataset.mode === mode) return;
    sender.dataset.mode = mode;
    sender.classList.toggle('is-stop', mode !== 'send');
    fill(sender, h('span', { class: 'send-word' }, t(mode)), icon(mode === 'send' ? 'send' : 'stop'));
  }

  const sendable = () => agent && (text.value.trim() || tray?.any() || draft.files.length) && [...text.value].length <= LONGEST;

  function replyTo(id) {
    draft.replyTo = id;
    keepDraft();
    paint();
    text.focus();
  }

  /** Restores text that was not sent, unless new text was typed. */
  function refill({ text: words = '', files = [], replyTo: to = null }) {
    if (text.value || tray?.any()) return false;
    text.value = words;
    Object.assign(draft, { files, replyTo: to });
    if (files.length) loadTray();
    changed();
    return true;
  }

  async function editLast(event) {
    const last = waitingFor(agent).at(-1);
    if (!last?.id) return;
    event.preventDefault();
    if (await withdraw(agent, last)) putBack(agent, last);
  }

  /** Adds text and files after what is written. */
  function add(words, files = []) {
    text.value = [text.value.replace(/\n*$/, ''), words].filter(Boolean).join('\n\n');
    draft.files = [...draft.files, ...files];
    if (files.length) loadTray();
    changed();
    text.focus();
    text.setSelectionRange(text.value.length, text.value.length);
  }

  // Files

  async function loadTray() {
    const { mountTray } = await import('./attachments.js');
    tray ??= mountTray(chips, agent, () => {
      keepDraft();
      paint();
      if (!tray?.waits || tray.busy()) return;
      tray.waits = false;
      submit(waitingPlan);
    }, moveTo, (chip, isLast) => uploadEnded(agent, chip, isLast));
    const files = draft.files;
    draft.files = [];
    if (files.length) tray.restore(files);
    if (intent && !left) {
      tray.waits = tray.isWhole();
      waitingPlan = intent.plan;
      undecided.checked = intent.isUndecided;
      intent = null;
    }
    return tray;
  }

  /** What is to happen when the uploads have ended. */
  const toSend = () => (tray?.waits ? { plan: waitingPlan, isUndecided: undecided.checked } : intent);

  /** The files of the draft that are uploaded. */
  const filesReady = () => [...draft.files, ...(tray?.ready() ?? [])];

  async function attach(files) {
    await loadTray();
    if (left && shown?.agent === agent) return shown.attach(files);
    tray.add(files);
    if (left && tray.leave()) handedTo.add(agent);
    else text.focus();
  }

  /** Moves the draft to an agent whose model accepts its attachments. */
  function moveTo(other) {
    const next = toSend();
    if (next && !readDraft(other)) intended.set(other, next); // with another draft, the person decides
    tray.waits = false;
    intent = null;
    addToDraft(other, draft.text);
    tray.hand(other);
    handedTo.add(other);
    localStorage.removeItem(kept(agent));
    left = true;
    go(agentPath(other));
  }

  // Sending

  /** `plan`: `{at, every, timeZone}` of a message to be delivered later. */
  function submit(plan = null) {
    if (left || text.disabled || !sendable()) return;
    if (tray?.busy()) {
      tray.waits = true;
      waitingPlan = plan;
      return paint();
    }
    waitingPlan = null;
    const files = filesReady();
    const words = text.value;
    const about = plan ? null : asksBack();
    const to = about ?? draft.replyTo;
    text.value = '';
    undecided.checked = true;
    tray?.clear();
    Object.assign(draft, { text: '', files: [], replyTo: null });
    changed();
    text.focus();
    deliver({ agent, text: words, files, replyTo: to, asksBack: Boolean(about), restores: true, plan });
  }

  /** Asks when to send what is written. */
  async function later() {
    if (clock.getAttribute('aria-disabled') === 'true') return text.focus();
    const { askWhen } = await import('./screens/send_later.js');
    const plan = await askWhen({ title: t('sendLater'), text: text.value });
    if (plan) submit(plan);
    else text.focus();
  }

  const drop = dropZone(attach);
  if ([handedTo.delete(agent), handedTo.delete(''), draft.files.length].some(Boolean)) loadTray();
  size();
  paint();
  const ends = [mountStrip(strip, agent), on([`agent:${agent}`, 'agents', 'snapshot', 'questions'], paint), drop];
  addEventListener('storage', follow);
  const focus = () => text.focus();
  shown = { agent, refill, add, attach, focus };
  const held = () => [draft.replyTo].filter(Boolean);
  holders.add(held);
  return {
    replyTo,
    refill,
    add,
    focus,
    leave() {
      keepDraft();
      if (toSend()) intended.set(agent, toSend());
      left = true;
      closePasted();
      shown = null;
      removeEventListener('storage', follow);
      if (tray?.leave()) handedTo.add(agent);
      holders.delete(held);
      ends.forEach((end) => end());
    },
  };
}

/** The upload of a file ended after its composer was left. Returns true if the draft was sent, because it waited for the file. */
function uploadEnded(agent, { status, artifact, why }, isLast) {
  if (status === 'ready') addToDraft(agent, '', [artifact]);
  const intent = intended.get(agent);
  if (!intent || (status === 'ready' && !isLast)) return false;
  intended.delete(agent);
  const draft = { text: '', files: [], replyTo: null, ...readDraft(agent) };
  if (status === 'ready') sendDraft(agent, draft, intent);
  else toast({ kind: 'error', text: t('notSentWhy', { text: shortOf(draft), why: why ?? t(status === 'big' ? 'uploadTooBig' : 'uploadFailed') }) });
  return status === 'ready';
}

function sendDraft(agent, { text, files, replyTo }, { plan, isUndecided }) {
  localStorage.removeItem(kept(agent));
  const question = !plan && isUndecided && asksApproval(agent);
  const asksBack = Boolean(question) && (!replyTo || replyTo === question.id);
  deliver({ agent, text, files, replyTo: asksBack ? question.id : replyTo, asksBack, restores: true, plan });
}

/** The question of an agent whose call waits for the person's approval. */
const asksApproval = (agent) => openQuestions(agent).find((one) => isOpen(one) && approvalOf(one));

/**
 * Sends the message; shows the questions it answers as closed unless the server refuses it.
 * `restores`: a message that was not sent returns to the composer.
 */
function deliver({ restores = false, ...what }) {
  const again = { clientId: newId(), replyTo: null, asksBack: false, plan: null, ...what };
  const sent = transmit(again, restores);
  navigator.locks?.request(keptAs(again.clientId), () => sent).catch(() => {}); // other tabs do not offer to send it meanwhile
  return sent;
}

async function transmit(again, restores) {
  const { agent, text, files, replyTo, asksBack, plan, clientId } = again;
  const payload = {};
  if (text.trim()) payload.text = text;
  if (files.length) payload.attachments = files.map(({ artifactRef, filename }) => ({ artifactRef, filename }));
  const asked = plan || asksBack ? [] : openQuestions(agent).filter((one) => isOpen(one) && (!replyTo || one.id === replyTo));
  const local = localOf(again);
  putLocal(local);
  for (const one of asked) state.sending.set(one.id, { option: null, clientId });
  touch('questions', ...asked.map((one) => `message:${one.id}`));
  const unsure = () => {
    local.unsure = true;
    touch(`thread:${agent}`, `queue:${agent}`);
  };
  const message = { clientId, to: agent, payload };
  if (replyTo) message.inReplyTo = replyTo;
  if (asksBack) message.asksBack = true;
  if (plan) Object.assign(message, planned(plan));
  try {
    const receipt = await send(message, unsure);
    if (plan) toast({ text: t('scheduledFor', { time: dayAndTime(receipt.scheduledDeliveryTime ?? plan.at) }) });
    for (const one of asked) {
      one.answer ??= { messageId: receipt.messageId, option: null };
      state.questions.delete(one.id);
    }
    confirmLocal(clientId, receipt);
  } catch (error) {
    await isShown; // a page that is left ends its requests, and what the server did with them is not known
    notSent(local, restores, error);
  } finally {
    for (const one of asked) if (state.sending.get(one.id)?.clientId === clientId) state.sending.delete(one.id);
    touch('questions', ...asked.map((one) => `message:${one.id}`));
  }
}

function notSent(local, restores, error) {
  const { again } = local;
  if (restores && restore(again.agent, asWritten(local))) dropLocal(local.clientId);
  else {
    Object.assign(local, { status: 'failed', unsure: false });
    putLocal(local); // the event of an equal message may have removed it
  }
  const short = shortOf(again);
  toast({ kind: 'error', text: error.status ? t('notSentWhy', { text: short, why: reasonOf(error) }) : t('notSent', { text: short }) });
}

const shortOf = ({ text, files }) => (text.length > 80 ? `${text.slice(0, 80)}…` : text || files.map((one) => one.filename).join(', '));

/** True for `15m` and `every 2 hours`: neither a time of day nor five cron fields. */
export const isInterval = (every) => !every.includes(':') && every.trim().split(/\s+/).length < 5;

/** Times of day have whole minutes: a start this much earlier finds the chosen one, however long the request takes. */
const MARGIN_MS = 30_000;

/** The fields of a request that make a message delayed or recurring. */
export function planned({ at, every, timeZone }) {
  const early = every && !isInterval(every) ? MARGIN_MS : 0;
  return { ...(at && { delayMs: Math.max(0, Date.parse(at) - early - now()) }), ...(every && { every, timeZone }) };
}

/** Sends a text of the page itself, without what is in the composer. */
export const sendText = (agent, text, files = []) => deliver({ agent, text, files });

export const retryLocal = (local) => {
  dropLocal(local.clientId);
  return deliver(local.again);
};

/** Puts a message into the composer of its agent, or into the stored draft. False if there is newer text. */
function restore(agent, { text, files, replyTo }) {
  if (shown?.agent === agent) return shown.refill({ text, files, replyTo });
  if (readDraft(agent)) return false;
  storeDraft(agent, { text, files, replyTo });
  return true;
}

/** What the composer had before a message was sent. The question that it only asks about is chosen anew. */
const asWritten = (message) => ({ text: textOf(message), files: message.payload?.attachments ?? [], replyTo: message.option === undefined && !message.asksBack ? message.inReplyTo : null });

/** Puts a message that is to be sent again into the composer of its agent, after newer text. */
export function putBack(agent, message) {
  const back = asWritten(message);
  if (!restore(agent, back)) {
    if (shown?.agent === agent) shown.add(back.text, back.files);
    else addToDraft(agent, back.text, back.files);
  }
  if (shown?.agent === agent) shown.focus();
}

/** A draft as it is stored; empty if it has nothing. */
const packed = ({ text, files, replyTo }) => (text || files?.length || replyTo ? JSON.stringify({ text, files, replyTo }) : '');

const storeDraft = (agent, draft) => localStorage.setItem(kept(agent), packed(draft));

function addToDraft(agent, words, more = []) {
  const { text, files = [], replyTo } = readDraft(agent) ?? {};
  storeDraft(agent, { text: [text, words].filter(Boolean).join('\n'), files: [...files, ...more], replyTo });
}

function readDraft(agent) {
  try {
    return JSON.parse(localStorage.getItem(kept(agent)));
  } catch {
    return null;
  }
}

/** Accepts files dropped anywhere on the conversation. */
function dropZone(attach) {
  const area = document.getElementById('main');
  const has = (event) => [...(event.dataTransfer?.types ?? [])].includes('Files');
  const over = (event) => {
    if (!has(event)) return;
    event.preventDefault();
    area.classList.add('is-drop');
    area.dataset.drop = t('dropHere');
  };
  const out = (event) => {
    if (!area.contains(event.relatedTarget)) area.classList.remove('is-drop');
  };
  const drop = (event) => {
    area.classList.remove('is-drop');
    if (!has(event)) return;
    event.preventDefault();
    attach([...event.dataTransfer.files]);
  };
  const off = new AbortController();
  for (const [type, fn] of Object.entries({ dragover: over, dragleave: out, drop })) area.addEventListener(type, fn, off);
  return () => off.abort();
}

