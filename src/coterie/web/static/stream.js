// The event stream: one connection for all tabs of this browser.
//
// The tab that holds the lock reads the stream and relays every event; the others check that none is missing. Without
// locks (plain http from another machine), each tab reads its own stream.

import { apply, asks, dropDrafts } from './events.js';
import { resync, snapshotRead, state, touch } from './state.js';

const NAME = 'panel-stream';
const DEAD_MS = 35_000;
const RELAY_MS = 40_000;
const AWAY_MS = 30_000;
const QUICK_MS = [50, 150, 250, 400, 600]; // first pauses between attempts
const SEEN_MS = 1_000; // later pauses while the page may be visible
const HIDDEN_MS = 15_000;
const WATCHED_MS = 20_000; // after a visible tab said that it waits for the connection
const ANSWER_MS = 5_000; // until the answer to an attempt begins
const VISIBLE_MS = 500; // until a visible tab has answered
const SHOW_MS = 2_000;
const RESTORED_MS = 3_000;

const channel = 'BroadcastChannel' in globalThis ? new BroadcastChannel(NAME) : null;
let leading = false;
let abort = null;
let wake = (_done) => {};
let heardAt = performance.now();
let hiddenAt = null;
let tries = 0;
let triedAt = 0;
let watchedUntil = 0;
let connected = false;
let waiting = Promise.resolve(); // events are handled one after the other, after a running snapshot

export function start() {
  asks.draft = askForDraft;
  if (channel) channel.onmessage = ({ data }) => {
    if (data.ask === 'visible' && !document.hidden) channel.postMessage({ visible: true });
    if (data.visible) whenVisible.splice(0).forEach((tell) => tell(true));
    (leading ? asked : relayed)(data);
  };
  if (navigator.locks && channel) {
    navigator.locks.request(NAME, lead).catch(lead);
    setInterval(watchRelay, 5_000);
    channel.postMessage({ ask: 'drafts' });
  } else lead();
  addEventListener('online', () => again());
  addEventListener('focus', retryNow);
  addEventListener('offline', () => state.connection !== 'stopped' && trouble());
  document.addEventListener('visibilitychange', seen);
  setInterval(() => leading && performance.now() - heardAt > DEAD_MS && again(), 5_000);
}

const whenVisible = [];

/** Resolves to true if another tab of the page is visible. */
export const isVisibleElsewhere = () => new Promise((resolve) => {
  whenVisible.push(resolve);
  setTimeout(() => resolve(false), VISIBLE_MS);
  channel?.postMessage({ ask: 'visible' });
});

/** Tries again at once if there is no connection. */
function retryNow() {
  if (!connected && leading) {
    tries = Math.min(tries, 1);
    wake();
  }
}

function seen() {
  if (!document.hidden) retryNow();
  if (!leading) wantStream();
  if (document.hidden) hiddenAt = performance.now();
  else if (hiddenAt !== null && performance.now() - hiddenAt > AWAY_MS && performance.now() - heardAt > AWAY_MS / 2) again();
}

/** Closes a possibly dead connection and reconnects at once. */
function again() {
  tries = 0;
  if (leading) {
    abort?.abort();
    wake();
  }
}

// The leading tab

let running = null;

/** Runs once per tab: a tab that took over from a silent one may get the lock later. */
const lead = () => (running ??= readStream());

async function readStream() {
  leading = true;
  for (;;) {
    channel?.postMessage({ connection: state.connection }); // without a connection, too: the other tabs leave it to this one
    abort = new AbortController();
    triedAt = performance.now();
    try {
      await connect(abort.signal);
    } catch {
      // the connection state shows it; retried below
    }
    connected = false;
    trouble();
    const pause = (QUICK_MS[tries] ?? (document.hidden && performance.now() > watchedUntil ? HIDDEN_MS : SEEN_MS)) * (0.75 + Math.random() / 2);
    tries += 1;
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, pause);
    });
  }
}

async function connect(signal) {
  heardAt = performance.now();
  const from = encodeURIComponent(`${state.epoch}.${state.seq}`);
  const late = setTimeout(() => abort.abort(), ANSWER_MS);
  const response = await fetch(`/api/v1/events?lastEventId=${from}`, { signal }).finally(() => clearTimeout(late));
  if (response.status === 401) await resync();
  if (!response.ok) throw new Error(String(response.status));
  const reader = response.body.getReader();
  const letters = new TextDecoder();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heardAt = performance.now();
    const parts = (rest + letters.decode(value, { stream: true })).split('\n\n');
    rest = parts.pop();
    const events = parts.map(parsed).filter((one) => one.kind);
    channel?.postMessage({ events }); // also without events: it shows that the connection is alive
    events.forEach(take);
  }
}

function parsed(text) {
  let kind = '';
  let id = '';
  let data = '';
  for (const line of text.split('\n')) {
    if (line.startsWith('event: ')) kind = line.slice(7);
    else if (line.startsWith('id: ')) id = line.slice(4);
    else if (line.startsWith('data: ')) data += line.slice(6);
  }
  return { kind, id, data: kind && JSON.parse(data) };
}

function asked({ ask, draft }) {
  if (ask === 'retry') {
    watchedUntil = performance.now() + WATCHED_MS;
    if (!connected && performance.now() - triedAt > SEEN_MS) wake(); // browsers delay the timers of hidden tabs
  }
  if (ask !== 'drafts') return;
  const wanted = [...state.drafts.values()].filter((one) => !one.stopped && !one.ended && (draft ?? one.id) === one.id);
  const events = wanted.map(({ id, agent, text }) => ({ kind: 'draft.snapshot', id: '', data: { draftId: id, agent, text } }));
  channel.postMessage({ events: [{ kind: 'position', data: { epoch: state.epoch, seq: state.seq } }, ...events], connection: state.connection });
}

function askForDraft(draft) {
  if (leading) again();
  else channel?.postMessage({ ask: 'drafts', draft });
}

// The other tabs

function relayed({ events, connection }) {
  if (!events && !connection) return;
  heardAt = performance.now();
  if (connection) {
    show(connection);
    wantStream();
  }
  events?.forEach(take);
}

/** Tells the leading tab, which may be hidden, that this visible one waits for the connection. */
function wantStream() {
  if (!document.hidden && !['ok', 'restored'].includes(state.connection)) channel?.postMessage({ ask: 'retry' });
}

function watchRelay() {
  if (!leading) wantStream();
  if (leading || performance.now() - heardAt < RELAY_MS) return;
  lead(); // the leading tab is silent
}

// Events in order

function take(event) {
  if (event.kind === 'hello') hello(event.data);
  waiting = waiting.then(() => inOrder(event)).catch(() => {});
}

async function inOrder({ kind, id, data }) {
  await snapshotRead();
  if (kind === 'hello') {
    if (data.epoch !== state.epoch || data.seq > state.seq) await fromSnapshot();
    return apply('configuration.state', data.configuration);
  }
  if (kind === 'reset') return fromSnapshot();
  if (kind === 'position') return data.epoch === state.epoch && data.seq > state.seq && fromSnapshot(); // a new tab missed events while it loaded
  if (kind === 'shutdown') {
    state.shutdown = data;
    return show('stopped');
  }
  if (id) {
    const [epoch, number] = id.split('.');
    const seq = Number(number);
    if (epoch === state.epoch && seq <= state.seq) return;
    if (epoch !== state.epoch || data.prev > state.seq) {
      await fromSnapshot();
      if (seq <= state.seq) return;
    }
    state.seq = seq;
  }
  apply(kind, data);
}

async function fromSnapshot() {
  dropDrafts();
  try {
    await resync();
  } catch (error) {
    abort?.abort(); // connects again, and then tries again
    throw error;
  }
  if (!leading) channel?.postMessage({ ask: 'drafts' });
}

function hello({ serverTime }) {
  connected = true;
  tries = 0;
  state.skew = Date.parse(serverTime) - Date.now();
  state.shutdown = null;
  fine();
}

// The connection state

let showing = null;
let hiding = null;

function trouble() {
  if (state.connection === 'stopped') return;
  showing ??= setTimeout(() => show(navigator.onLine ? 'reconnecting' : 'offline'), SHOW_MS);
}

function fine() {
  clearTimeout(showing);
  showing = null;
  if (state.connection !== 'ok' && state.connection !== 'restored') show('restored');
}

function show(what) {
  clearTimeout(hiding);
  if (what === state.connection) return;
  state.connection = what;
  if (what === 'restored') hiding = setTimeout(() => show('ok'), RESTORED_MS);
  if (leading) channel?.postMessage({ connection: what });
  touch('connection');
}
