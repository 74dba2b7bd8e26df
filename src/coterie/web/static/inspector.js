// The right column: what the agent of the conversation is, and its scheduled messages.

import { avatar, fill, h, sync } from './dom.js';
import { t } from './i18n.js';
import { doing } from './agents_list.js';
import { agentPath, missed, route, screenNamed } from './router.js';
import { addressed, nameOf, on, state, takes } from './state.js';
import { region, small } from './shell.js';

let ends = [];

export function start() {
  mount();
  document.addEventListener('languagechange', mount);
}

function mount() {
  ends.splice(0).forEach((end) => end());
  const root = region('inspector');
  const about = h('section', { class: 'about', 'data-testid': 'inspector-about' });
  const facts = h('dl', { class: 'about-facts' });
  const links = h('p', { class: 'about-links' });
  const panel = h('div', { class: 'panel' });
  const later = h('section', { 'aria-labelledby': 'inspector-later' }, h('h2', { id: 'inspector-later' }, t('delayed')), panel);
  fill(root, h('div', { class: 'inspector-body', tabindex: '0', role: 'group', 'aria-label': t('regionInspector') }, about, facts, later, links));
  let shown = null; // the agent of the list
  let leave = null;
  let turn = 0;

  function paint() {
    const one = state.agents.get(addressed());
    root.classList.toggle('is-empty', !one);
    if (!one) return;
    sync(about, avatar(one, { size: 'large' }), h('h2', { dir: 'auto' }, one.name || one.id), one.role && h('p', { class: 'meta', dir: 'auto' }, one.role), one.description && h('p', { dir: 'auto' }, one.description));
    const kinds = takes(one).map((kind) => t(`can_${kind}`)).join(t('comma'));
    const rows = [[t('tasksState'), one.state === 'active' && one.phase === 'tool' && one.tool ? t('runningTool', { name: one.tool }) : doing(one)], [t('model'), one.service], [t('takesIn'), kinds], [t('createdBy'), one.parent && h('a', { href: agentPath(one.parent) }, nameOf(one.parent))]];
    sync(facts, rows.filter(([, value]) => value).map(([name, value]) => [h('dt', {}, name), h('dd', { dir: 'auto' }, value)]));
    sync(links, h('a', { href: `#/agents/${encodeURIComponent(one.id)}` }, t('details')), h('a', { href: `#/timeline?agent=${encodeURIComponent(one.id)}` }, t('timeline')), h('a', { href: '#/artifacts' }, t('artifacts')), h('a', { href: '#/org' }, t('org')));
    if (!small.matches && shown !== one.id) open(one.id);
  }

  async function open(id) {
    const mine = (turn += 1);
    shown = id;
    try {
      const module = await screenNamed('delayed').load();
      if (mine !== turn) return;
      leave?.();
      leave = module.render(fill(panel), { args: [], query: new URLSearchParams({ agent: id }), compact: true }) ?? null;
    } catch {
      if (mine === turn) missed(panel, screenNamed('delayed'), () => open(id));
    }
  }

  const onScreen = () => ['a', ''].includes(route().name) && paint();
  document.addEventListener('screen', onScreen);
  small.addEventListener('change', onScreen);
  paint();
  ends = [on(['agents', 'snapshot'], onScreen), on(['agent:*', 'drafts:*'], (topic) => topic.endsWith(`:${addressed()}`) && onScreen()), () => leave?.(), () => document.removeEventListener('screen', onScreen), () => small.removeEventListener('change', onScreen)];
}
