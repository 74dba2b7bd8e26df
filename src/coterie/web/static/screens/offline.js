// Script of offline.html: loads the page that was asked for as soon as the server answers.

const PAUSE_MS = 2_000;

const look = () => fetch('/', { cache: 'no-store' }).then(({ ok }) => ok && location.reload(), () => {});

setInterval(look, PAUSE_MS);
addEventListener('online', look);
