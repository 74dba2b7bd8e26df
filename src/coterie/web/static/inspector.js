// The right column: delayed messages, files and organisation as compact screens, and the agents' capabilities.

import { fill, h } from './dom.js';
import { t } from './i18n.js';
import { missed, screenNamed } from './router.js';
import { on, state, takes } from './state.js';
import { region, small } from './shell.js';

const PANELS = ['delayed', 'artifacts', 'org'];
const KEPT = 'coterie.panel';
let ends = [];

export function start() {
  mount();
  document.addEventListener('languagechange', mount);
}

function mount() {
  ends.splice(0).forEach((end) => end());
  const root = region('inspector');
  let shown = PANELS.find((name) => name === localStorage.getItem(KEPT)) ?? PANELS[0];
  let leave = null;
  let turn = 0;
  const tabs = h('div', { class: 'tabs', role: 'tablist', 'aria-label': t('tabs'), onkeydown: keys });
  const panel = h('div', { class: 'panel', role: 'tabpanel', id: 'panel', tabindex: '0' });
  const caps = h('section', { class: 'caps', 'aria-label': t('takesIn') });
  fill(root, tabs, panel, caps);

  function paintTabs() {
    fill(tabs, PANELS.map((name) => h('button', { type: 'button', class: 'tab', role: 'tab', id: `tab-${name}`, 'aria-selected': String(name === shown), 'aria-controls': 'panel',
      tabindex: name === shown ? '0' : '-1', 'data-testid': `tab-${name}`, onclick: () => open(name) }, t(name), name === 'delayed' && state.delayed.size ? ` ${state.delayed.size}` : null)));
    panel.setAttribute('aria-labelledby', `tab-${shown}`);
  }

  async function open(name) {
    const mine = (turn += 1);
    shown = name;
    localStorage.setItem(KEPT, name);
    paintTabs();
    try {
      const module = await screenNamed(name).load();
      if (mine !== turn) return;
      leave?.();
      fill(panel);
      panel.scrollTop = 0;
      leave = module.render(panel, { args: [], query: new URLSearchParams(), compact: true }) ?? null;
    } catch {
      if (mine === turn) missed(panel, screenNamed(name), () => open(name));
    }
  }

  function keys(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    open(PANELS[(PANELS.indexOf(shown) + by + PANELS.length) % PANELS.length]);
    tabs.querySelector('[aria-selected="true"]').focus();
  }

  function paintCaps() {
    const agents = [...state.agents.values()].filter((one) => one.kind !== 'person' && one.state !== 'terminated');
    const words = (one) => takes(one).map((kind) => t(`cap_${kind}`)).join(' · ');
    fill(caps, h('h2', {}, t('takesIn')), h('dl', {}, agents.slice(0, 40).map((one) => [h('dt', { title: one.name }, one.name), h('dd', {}, words(one))])));
    caps.tabIndex = caps.scrollHeight > caps.clientHeight ? 0 : -1;
  }

  // On a phone these are separate screens. A slide-over is filled when it is first opened.
  const begin = () => !small.matches && !leave && turn === 0 && open(shown);
  small.addEventListener('change', begin);
  paintTabs();
  paintCaps();
  begin();
  ends = [on(['delayed', 'snapshot'], paintTabs), on(['agents', 'snapshot'], paintCaps), () => leave?.(), () => small.removeEventListener('change', begin)];
}
