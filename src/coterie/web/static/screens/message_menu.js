// The menu of one message: copy, quote, link, reply, edit and send again, mark as unread.

import { post } from '../api.js';
import { t } from '../i18n.js';
import { copyText, oops, toast } from '../notices.js';
import { agentPath } from '../router.js';
import { isSaid, PERSON, state, SYSTEM, textOf, thread, threadOf } from '../state.js';
import { putBack, sendText } from '../composer.js';
import { openComposer } from '../thread.js';
import { withdraw } from '../waiting.js';
import { openMenu } from './menu.js';

/** The person's newest message of a conversation. */
const lastOwn = (agent) => thread(agent).ids.findLast((id) => state.messages.get(id)?.from === PERSON);
/** The person's message that an answer belongs to: the one it answers, or the last one before it. */
function askedBy(message, agent) {
  const answered = message.inReplyTo && state.messages.get(message.inReplyTo);
  if (answered?.from === PERSON) return answered;
  const ids = thread(agent).ids;
  const before = ids.slice(0, ids.indexOf(message.id)).findLast((id) => state.messages.get(id)?.from === PERSON);
  return before && state.messages.get(before);
}

/** The text as it looks, without the language and the button of each code block. */
function shownText(body) {
  const heads = [...(body?.querySelectorAll('.md-code-head') ?? [])];
  for (const head of heads) head.hidden = true; // innerText leaves out what is not shown
  const text = body?.innerText;
  for (const head of heads) head.hidden = false;
  return text;
}

/** `el`: the shown message, whose text is copied as it looks. */
export function openMessageMenu(anchor, message, el) {
  const agent = threadOf(message);
  const text = textOf(message);
  const mine = message.from === PERSON;
  const stored = !isSaid(message.id); // other words are a part of a plan
  const asked = stored && !mine && message.from !== SYSTEM && askedBy(message, agent);
  const composer = openComposer();
  const again = (one) => sendText(agent, String(one.payload?.text ?? ''), one.payload?.attachments ?? []);
  openMenu(anchor, t('messageMenu'), [
    text && { label: t('copyText'), sign: 'copy', run: () => copyText(shownText(el.querySelector('.md')) ?? text) },
    text && { label: t('copyMarkdown'), sign: 'copy', run: () => copyText(text) },
    { label: t('copyLink'), sign: 'link', run: () => copyText(`${location.origin}${location.pathname}${agentPath(agent, message.id)}`) },
    composer && null,
    composer && text && { label: t('quote'), sign: 'quote', run: () => composer.add(`${text.replace(/^/gm, '> ')}\n\n`) },
    composer && stored && !mine && message.from !== SYSTEM && { label: t('replyTo'), sign: 'reply', run: () => composer.replyTo(message.id) },
    composer && mine && lastOwn(agent) === message.id && { label: t('editResend'), sign: 'pen', run: () => editAgain(message, agent) },
    mine && { label: t('sendAgain'), sign: 'retry', run: () => again(message) },
    asked && { label: t('tryAgain'), sign: 'retry', run: () => again(asked) },
    stored && message.to === PERSON && null,
    stored && message.to === PERSON && { label: t('markUnread'), sign: 'inbox', run: () => markUnread(message, agent) },
  ]);
}

/** Puts the text into the composer. What the agent has not taken yet is withdrawn, so that it gets only the new text. */
async function editAgain(message, agent) {
  if (message.state === 'pending') await withdraw(agent, message);
  putBack(agent, message);
  toast({ text: t('editResendHow') });
}

export async function markUnread(message, agent) {
  try {
    // The conversation stays open: it must not mark the message as read at once.
    thread(agent).keepUnread = true;
    await post('/unread', { thread: agent, from: message.id });
    toast({ text: t('markedUnread') });
  } catch (error) {
    thread(agent).keepUnread = false;
    oops(error);
  }
}
