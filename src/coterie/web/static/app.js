// Entry point: shows the shell, loads the society, then loads all other modules.

import { whenLocked } from './api.js';
import { flag } from './dom.js';
import { t } from './i18n.js';
import * as notices from './notices.js';
import { route, screen, show, start } from './router.js';
import { restoreLocals, resync, state } from './state.js';
import { applyTheme, buildShell, followKeyboard, frame, locked } from './shell.js';
import * as thread from './thread.js';

const RETRY_MS = 2_000;

for (const name of ['a', '']) screen(name, { title: () => t('conversation'), render: thread.render });
for (const name of ['inbox', 'tasks', 'timeline', 'org', 'delayed', 'artifacts', 'agents', 'dead', 'start', 'setup']) {
  screen(name, { title: () => t(name), load: () => import(`./screens/${name}.js`) });
}

async function boot() {
  const isUsedLink = new URLSearchParams(location.search).has('code');
  if (isUsedLink) history.replaceState(null, '', location.pathname + location.hash);
  applyTheme();
  buildShell();
  followKeyboard();
  let isLocked = false;
  whenLocked(() => {
    if (!isLocked) locked(isUsedLink);
    isLocked = true;
  });
  restoreLocals();
  await start(frame);
  while (!state.booted && !isLocked) {
    await resync().catch(() => new Promise((resolve) => setTimeout(resolve, RETRY_MS)));
  }
  if (isLocked) return;
  if (route().name === '') await show();
  const [stream, ...rest] = await Promise.all([
    import('./stream.js'),
    import('./keyboard.js'),
    import('./inspector.js'),
    import('./trim.js'),
  ]);
  stream.start();
  for (const each of [notices, ...rest]) each.start();
  if (flag('notify')) import('./screens/settings.js').then((settings) => settings.start());
  import('./screens/away.js').then((away) => away.start(), () => {}); // the conversation does not need it
  import('./screens/install.js').then((app) => app.start(), () => {});
  import('./screens/start.js').then((card) => card.start(), () => {});
  document.documentElement.dataset.ready = '';
}

boot();
