// One picture, as large as the window or as large as it is.

import { artifactUrl } from '../api.js';
import { button, h } from '../dom.js';
import { bytes, t } from '../i18n.js';
import { openDialog } from './dialog.js';

export function openImage({ artifactRef, filename, mimeType, size }) {
  const picture = h('img', { src: artifactUrl(artifactRef), alt: filename });
  const frame = h('div', { class: 'picture', tabindex: '0', role: 'group', 'aria-label': filename }, picture);
  const whole = button({ class: 'plain-btn', text: t('imageFull'), 'aria-pressed': 'false' });
  whole.addEventListener('click', () => {
    const full = frame.classList.toggle('full');
    whole.setAttribute('aria-pressed', String(full));
  });
  const about = h('span', { class: 'meta', text: [mimeType, size !== undefined && bytes(size)].filter(Boolean).join(' · ') });
  const save = h('a', { class: 'plain-btn', href: artifactUrl(artifactRef), download: filename, text: t('downloadFile') });
  return openDialog(filename, [frame, h('div', { class: 'modal-foot' }, about, whole, save)], { wide: true });
}
