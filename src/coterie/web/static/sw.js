// Service worker: says so if the server does not answer, and opens the message of a notification that was clicked.
// Everything else goes to the server: the page must never show an old state.

const CACHE = 'coterie-offline-1';
const SHELL = ['/static/offline.html', '/static/screens/offline.js', '/static/tokens.css', '/static/layout.css', '/static/icon.svg'];

addEventListener('install', (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(SHELL)).then(() => skipWaiting()));
});

addEventListener('activate', (event) => {
  event.waitUntil(caches.keys().then((names) => Promise.all(names.filter((name) => name !== CACHE).map((name) => caches.delete(name)))).then(() => clients.claim()));
});

addEventListener('fetch', (event) => {
  const { mode, url } = event.request;
  if (mode === 'navigate') event.respondWith(fetch(event.request).catch(() => caches.match(SHELL[0])));
  // Only the offline page needs them, and only while the server does not answer.
  else if (SHELL.includes(new URL(url).pathname)) event.respondWith(fetch(event.request).catch(() => caches.match(event.request)));
});

addEventListener('notificationclick', (event) => {
  const { path } = event.notification.data ?? {};
  event.notification.close();
  event.waitUntil(clients.matchAll({ type: 'window', includeUncontrolled: true }).then(([page]) => {
    if (!page) return clients.openWindow(path ?? '/');
    page.postMessage({ open: path });
    return page.focus();
  }));
});
