// The menu of a conversation: find, export, clear, pause; and stop or pause everything.

import { artifactUrl, del, post } from '../api.js';
import { t } from '../i18n.js';
import { oops, toast } from '../notices.js';
import { go } from '../router.js';
import { isOpenTask, openTasks, PERSON, state, thread } from '../state.js';
import { stop } from '../agents_list.js';
import { editPath, pagePath } from './agents.js';
import { markUnread } from './message_menu.js';
import { openMenu } from './menu.js';
import { confirm } from './parts.js';

const agentUrl = (id, what) => `/agents/${encodeURIComponent(id)}/${what}`;
const exportUrl = (id, format) => `${artifactUrl('').replace(/artifacts\/$/, '')}threads/${encodeURIComponent(id)}/export?format=${format}`;
const tried = (work) => work().catch((error) => oops(error));

export const pauseAll = () => tried(() => post(state.allPaused ? '/resume' : '/pause'));

/** Stops every open task and every turn, after a question. */
export async function stopAll() {
  const active = [...state.agents.values()].filter((one) => one.state === 'active');
  const tasks = openTasks();
  if (!active.length && !tasks.length) return toast({ text: t('stopAllNone') });
  if (!(await confirm(t('stopAllSure'), t('stopAll'), t('stopAllMeans', { agents: active.length, tasks: tasks.length })))) return;
  await tried(async () => {
    await Promise.all(tasks.filter(isOpenTask).map((one) => post(`/tasks/${encodeURIComponent(one.id)}/stop`)));
    await Promise.all(active.map((one) => stop(one.id)));
    toast({ text: t('stopAllDone') });
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
