// The menu of a conversation: find, export, clear, pause; and stop or pause everything.

import { artifactUrl, del, post, query } from '../api.js';
import { t } from '../i18n.js';
import { oops, toast } from '../notices.js';
import { go } from '../router.js';
import { openTasks, PERSON, state, thread, unmarked } from '../state.js';
import { editPath, pagePath } from './agents.js';
import { markUnread } from './message_menu.js';
import { openMenu } from './menu.js';
import { confirm } from './parts.js';

const agentUrl = (id, what) => `/agents/${encodeURIComponent(id)}/${what}`;
const exportUrl = (id, format) => `${artifactUrl('').replace(/artifacts\/$/, '')}threads/${encodeURIComponent(id)}/export?format=${format}`;
const tried = (work) => work().catch((error) => oops(error));

export const pauseAll = () => tried(() => post(state.allPaused ? '/resume' : '/pause'));

const STOP_ROUNDS = 5; // a stop may let waiting mail begin a new turn
const ROUND_MS = 400; // until the events about a stop have arrived
const NAMED = 5; // of what could not be stopped

const activeAgents = () => [...state.agents.values()].filter((one) => one.state === 'active');

/** All that works or waits, `[name, path]`. The snapshot has only the first tasks. */
async function allOpen() {
  const found = [];
  for (const name of ['working', 'waiting']) {
    for (let cursor; cursor !== null; ) {
      const page = await query('/tasks', { state: name, cursor, limit: 200 });
      found.push(...page.items.map((one) => [unmarked(one.text).slice(0, 60) || t('noText'), `/tasks/${encodeURIComponent(one.id)}/stop`]));
      cursor = page.next;
    }
  }
  return [...found, ...activeAgents().map((one) => [one.name, agentUrl(one.id, 'stop')])];
}

/** Stops every open task and every turn, after a question; says what could not be stopped. */
export async function stopAll() {
  const agents = activeAgents().length;
  const tasks = openTasks().length + state.moreTasks;
  if (!agents && !tasks) return toast({ text: t('stopAllNone') });
  if (!(await confirm(t('stopAllSure'), t('stopAll'), t('stopAllMeans', { agents, tasks })))) return;
  await tried(async () => {
    let left = await allOpen();
    for (let round = 0; left.length && round < STOP_ROUNDS; round += 1) {
      await Promise.allSettled(left.map(([, path]) => post(path)));
      await new Promise((next) => setTimeout(next, ROUND_MS));
      left = await allOpen();
    }
    if (!left.length) return toast({ text: t('stopAllDone') });
    const names = left.slice(0, NAMED).map(([name]) => name).join(t('comma')) + (left.length > NAMED ? ' …' : '');
    toast({ kind: 'error', text: t('stopAllLeft', { n: left.length, names }) });
  });
}

export function openConversationMenu(anchor, id) {
  const one = state.agents.get(id);
  if (!one) return;
  const last = thread(id).ids.findLast((each) => state.messages.get(each)?.to === PERSON);
  const paused = one.state === 'paused';
  openMenu(anchor, t('conversationMenu'), [
    { label: t('agentPage'), sign: 'help', run: () => go(pagePath(id)) },
    !one.retired && one.state !== 'terminated' && { label: t('agentEdit'), sign: 'pen', run: () => go(editPath(id)) },
    null,
    { label: t('findHere'), sign: 'search', run: () => import('./find.js').then((find) => find.openFind(id)) },
    last && { label: t('markUnread'), sign: 'inbox', run: () => markUnread(state.messages.get(last), id) },
    { label: t('exportMarkdown'), sign: 'down', href: exportUrl(id, 'markdown'), download: `${id}.md` },
    { label: t('exportJson'), sign: 'down', href: exportUrl(id, 'json'), download: `${id}.json` },
    null,
    one.state !== 'terminated' && { label: t(paused ? 'resumeThis' : 'pauseThis', { name: one.name }), sign: paused ? 'send' : 'pause', run: () => tried(() => post(agentUrl(id, paused ? 'resume' : 'pause'))) },
    { label: t(state.allPaused ? 'resumeAll' : 'pauseAll'), sign: 'pause', run: pauseAll },
    { label: t('stopAll'), sign: 'stop', run: stopAll },
    null,
    { label: t('clearThread'), sign: 'close', danger: true, run: () => clear(id, one.name) },
  ]);
}

async function clear(id, name) {
  if (!(await confirm(t('clearSure', { name }), t('clearThread'), t('clearMeans')))) return;
  await tried(() => del(`/threads/${encodeURIComponent(id)}`)); // an event empties the conversation in all tabs
}
