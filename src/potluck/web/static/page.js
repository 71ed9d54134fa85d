'use strict';
const $ = (id) => document.getElementById(id);
const data = JSON.parse($('data').textContent);
const ICONS = {good: '✓', info: '·', warn: '!', bad: '✕'};
const STATES = {computing: ['●', 'good'], late: ['!', 'warn'], 'sitting out': ['◐', 'warn'], gone: ['✕', 'bad'], done: ['✓', 'info'], connected: ['●', 'good'], 'in the run': ['●', 'good']};
const KINDS = [['compute', 'computes'], ['update', 'updates the weights'], ['send', 'sends'], ['receive', 'receives'], ['wait', 'waits']];
const WORDS = {
  run: 'at once: the samples of a micro-batch. rate: samples/s while it computes. busy: the part of the time in which it computes.',
  lab: 'solo: the host alone, which speed-up compares with. efficiency: samples/s as a part of what all machines reach alone, summed. recovery: how much of what the guests could add arrived.',
};
const came = {}; // when a part of the page came last
const compact = document.body.classList.contains('compact');
let byTime = false, known = true;

// Elements are made one by one and texts are set as text, so nothing that a machine says can become markup.
function el(tag, attributes = {}, ...children) {
  const made = ['svg', 'g', 'rect', 'line', 'path', 'text', 'title'].includes(tag)
    ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) if (value != null) made.setAttribute(key, value);
  made.append(...children.filter((child) => child != null && child !== ''));
  return made;
}

function fill(parent, ...children) { parent.replaceChildren(...children.filter((child) => child != null)); }

function seconds(s) {
  if (s < 10) return s.toFixed(1) + ' s';
  if (s < 60) return Math.round(s) + ' s';
  const m = Math.floor(s / 60);
  return m < 60 ? `${m} min ${String(Math.floor(s % 60)).padStart(2, '0')} s` : m < 1440 ? `${Math.floor(m / 60)} h ${m % 60} min` : `${Math.floor(m / 1440)} d ${Math.floor(m / 60) % 24} h`;
}

function number(x) {
  const size = Math.abs(x);
  if (size >= 1e15 || (x && size < 1e-4)) return x.toExponential(1);
  for (const [unit, per] of [['G', 1e9], ['M', 1e6], ['k', 1e4]]) if (size >= per) return +(x / (unit === 'k' ? 1e3 : per)).toPrecision(3) + ' ' + unit;
  return String(+x.toPrecision(4));
}

// A number stays in one line with its unit.
function tight(text) { return text.replace(/(\d) (?=(?:ms|s|min|h|d)\b|%)/g, '$1\u00a0'); }

function ticks(low, high, about) {
  const raw = (high - low) / about || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw * 0.999);
  const made = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) made.push(+at.toPrecision(12));
  return made;
}

// -- sections -----------------------------------------------------------------------------------------

function headlines(list) {
  fill($('headlines'), ...list.map((h) => el('div', {class: 'big'}, el('span', {}, h.label), el('b', {}, h.value), el('span', {}, tight(h.note)))));
}

function card(m) {
  const [icon, level] = STATES[m.state] || ['○', 'info'];
  const facts = [];
  if (m.samples) facts.push(`${m.share} of the step (${m.samples} samples)`);
  if (m.rate && m.state !== 'gone') facts.push(`${m.rate.replace(/ ?\/s$/, '')} samples/s`);
  if (m.busy) facts.push(`computes ${m.busy} of the time`);
  const bar = data.table?.length && el('div', {class: 'share', role: 'img', 'aria-label': `share ${m.share}`}, el('i'));
  if (bar) bar.firstChild.style.width = m.share.replace(' ', '');
  const heard = el('small', {class: 'heard'});
  if (m.heard_s != null) heard.dataset.heard = m.heard_s;
  return el('div', {class: 'card ' + m.role}, el('h3', {}, el('span', {}, m.name), el('span', {class: 'chip ' + level}, `${icon} ${m.state}`)),
    el('small', {}, m.device), m.state === 'gone' || !bar ? null : bar, el('small', {}, tight(facts.join('\u00a0· '))),
    m.reason ? el('small', {class: level}, m.reason) : null, heard);
}

function fleet(machines) {
  const host = machines.find((m) => m.role === 'host'), guests = machines.filter((m) => m.role !== 'host');
  $('fleet').hidden = !machines.length;
  $('fleet-h').textContent = guests.some((m) => m.samples) ? 'Fleet, in the last step' : 'Fleet';
  const cut = host?.state === 'gone', idle = (m) => !m.samples && data.kind !== 'guest';
  const rows = guests.map((m) => el('li', {class: m.state === 'gone' || cut ? 'gone' : idle(m) ? 'idle' : ''},
    el('div', {class: 'wire', title: 'measured rate of the link'}, m.link || (m.state === 'gone' ? 'no link' : '\u00a0')), card(m)));
  const kinds = ['guests', guests.length > 4 ? 'many' : '', host ? '' : 'unlinked'];
  fill($('fleet').querySelector('.body'), el('div', {class: host && guests.length ? 'fleet' : ''}, host ? card(host) : null,
    guests.length ? el('ul', {class: kinds.join(' ')}, ...rows) : data.no_guests ? el('p', {class: 'note'}, data.no_guests) : null));
  trunks();
  age();
}

// The line from the host to its guests begins and ends at one of them.
function trunks() {
  const list = $('fleet').querySelector('ul');
  if (!list) return;
  const columns = list.classList.contains('many') ? getComputedStyle(list).gridTemplateColumns.split(' ').length : 1;
  list.classList.toggle('column', columns === 1);
  [...list.children].forEach((item, i, all) => {
    item.classList.toggle('last', i + columns >= all.length);
    item.classList.toggle('along', i < columns - 1);
  });
}

function notices(list) {
  fill($('notices').querySelector('ol'), ...list.map((n) => el('li', {}, el('span', {class: n.level, 'aria-hidden': 'true'}, ICONS[n.level]),
    el('span', {}, el('time', {}, `at ${seconds(n.t_s)}` + (n.step ? `, step ${n.step}` : '')), n.text, n.times > 1 ? el('b', {}, ` (${n.times} times)`) : null))));
}

function table() {
  $('figures').hidden = !(data.facts || []).length && !(data.table || []).length;
  $('figures-h').textContent = data.kind === 'run' ? 'Figures of the whole run' : 'Figures';
  fill($('figures').querySelector('dl'), ...(data.facts || []).flatMap(([label, text]) => [el('dt', {}, label), el('dd', {}, text)]));
  const right = new Set(data.numeric || [3, 4, 5, 6, 7]);
  const row = (cells, tag) => el('tr', {}, ...cells.map((cell, i) => el(tag,
    {class: right.has(i) ? 'num' : null, ...(tag === 'th' ? {scope: 'col'} : {'data-label': data.header[i]})}, cell)));
  fill($('figures').querySelector('table'), ...((data.table || []).length ? [row(data.header, 'th'), ...data.table.map((cells) => row(cells, 'td'))] : []));
  $('words').textContent = (data.table || []).length ? WORDS[data.kind] || '' : '';
}

// -- timelines ----------------------------------------------------------------------------------------

function key(kind) {
  const high = kind === 'send' || kind === 'receive' ? 5 : 12;
  return el('svg', {width: 16, height: 14, 'aria-hidden': 'true'}, el('rect', {class: kind, x: 1, width: 14, height: high, y: kind === 'send' ? 1 : kind === 'receive' ? 8 : 1}));
}

function timelineRows(view, width, names) {
  const notes = width < 600 ? view.rows.map((machine) => (machine.note || '').length - 1) : [];
  const left = Math.min(width < 600 ? 98 : 170, 14 + 7 * Math.max(4, ...notes, ...names.map((n) => n.length)));
  const right = width < 600 ? 8 : 112, inner = width - left - right, rowHeight = 38, top = view.title ? 58 : 20, scale = inner / view.seconds;
  const height = top + rowHeight * view.rows.length + 24, cut = Math.floor((left - 10) / 7);
  const svg = el('svg', {width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': view.label});
  if (view.title) svg.append(el('text', {x: 0, y: 15, class: 'strong'}, view.title), el('text', {x: 0, y: 31, class: 'dim'}, view.note));
  view.rows.forEach((machine, i) => {
    const y = top + i * rowHeight, group = el('g');
    group.append(el('rect', {class: 'track', x: left, y: y + 2, width: inner, height: rowHeight - 6}),
      el('text', {x: left - 8, y: y + (right > 20 ? 23 : 16), 'text-anchor': 'end'}, machine.name.length > cut ? machine.name.slice(0, cut - 1) + '…' : machine.name));
    for (const [kind, start, end] of machine.bars) {
      const [from, high] = {send: [4, 5], receive: [rowHeight - 11, 5], fault: [2, rowHeight - 6]}[kind] || [11, rowHeight - 24];
      group.append(el('rect', {class: kind, x: left + start * scale, y: y + from, width: Math.max(0.5, (end - start) * scale), height: high},
        el('title', {}, `${machine.name}: ${kind}, ${seconds(end - start)}`)));
    }
    group.append(right > 20 ? el('text', {x: left + inner + 8, y: y + 23, class: 'dim'}, machine.note)
      : el('text', {x: left - 8, y: y + 30, class: 'dim', 'text-anchor': 'end'}, machine.note));
    svg.append(group);
  });
  let free = 0;
  for (const [at, label, middle] of view.marks) {
    const x = left + at * scale, half = 3.5 * label.length;
    svg.append(el('line', {class: 'mark', x1: x, x2: x, y1: top - 8, y2: height - 22}));
    if (middle * scale - half < free) continue;
    free = middle * scale + half;
    svg.append(el('text', {class: 'dim', x: left + middle * scale, y: top - 5, 'text-anchor': 'middle'}, label));
  }
  for (const at of ticks(0, view.seconds, width < 600 ? 4 : 10)) svg.append(el('text', {class: 'dim', x: Math.min(left + at * scale, width - 16), y: height - 6, 'text-anchor': 'middle'}, seconds(at)));
  return svg;
}

function liveView(width) {
  const steps = data.steps || [];
  const shown = steps.slice(width < 600 ? -3 : width < 1000 ? -5 : -8);
  if (!shown.length) return [];
  const found = new Map(), marks = [];
  let at = 0;
  for (const step of shown) {
    for (const machine of step.rows) {
      if (!found.has(machine.name)) found.set(machine.name, {name: machine.name, bars: []});
      const own = found.get(machine.name);
      own.note = step === shown[shown.length - 1] ? machine.note : 'gone';
      own.bars.push(...machine.bars.map(([kind, start, end]) => [kind, start + at, end + at]));
    }
    marks.push([at + step.seconds, `step ${step.step}`, at + step.seconds / 2]);
    at += step.seconds;
  }
  return [{rows: [...found.values()], marks, seconds: at, label: `The last ${shown.length} steps of each machine`}];
}

function timeline() {
  const body = $('timeline').querySelector('.body'), width = Math.max(260, Math.floor(body.clientWidth));
  const views = data.timelines
    ? data.timelines.map((t) => ({...t, label: `${t.title}: ${t.note}`, marks: t.marks.map(([at, label], i, all) => [at, label, (at + (i ? all[i - 1][0] : 0)) / 2])}))
    : liveView(width);
  $('timeline').hidden = !views.length;
  fill($('timeline').querySelector('.legend'), ...KINDS.filter(([kind]) => views.some((v) => v.rows.some((l) => l.bars.some((b) => b[0] === kind))))
    .map(([kind, words]) => el('span', {}, key(kind), words)));
  const names = views.flatMap((view) => view.rows.map((machine) => machine.name));
  fill(body, ...views.map((view) => timelineRows(view, width, names)));
  $('timeline-note').textContent = data.timelines ? 'All on one time scale, from the middle of each run.'
    : 'The last steps. Lengths, and when a gradient arrived, are measured; where in its step a guest computed follows from them.';
}

// -- curves -------------------------------------------------------------------------------------------

function curve(label, index, width) {
  const rows = data.curves.rows.filter((row) => row[2 + 3 * index] != null), height = compact ? 118 : 190, left = 54, right = 12, top = 10, bottom = 24;
  if (!rows.length) return null;
  const at = (row) => row[byTime ? 1 : 0];
  let low = Math.min(...rows.map((r) => r[2 + 3 * index])), high = Math.max(...rows.map((r) => r[3 + 3 * index]));
  if (index === 1) low = Math.min(low, 0);
  if (index === 2) low = Math.min(low, 1);
  const gap = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  low -= index === 1 ? 0 : gap; high += gap;
  const first = Math.min(at(rows[0]), byTime ? 0 : data.kind === 'guest' ? Infinity : 1), last = Math.max(at(rows[rows.length - 1]), first + 1);
  const x = (v) => left + (v - first) / (last - first) * (width - left - right), y = (v) => top + (high - v) / (high - low) * (height - top - bottom);
  const points = (column) => rows.map((row) => `${x(at(row)).toFixed(1)},${y(row[column + 3 * index]).toFixed(1)}`);
  const svg = el('svg', {width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'img', 'aria-label': `${label}; arrow keys show values`});
  for (const v of ticks(low, high, compact ? 3 : 5)) svg.append(el('line', {class: 'grid', x1: left, x2: width - right, y1: y(v), y2: y(v)}), el('text', {class: 'dim', x: left - 6, y: y(v) + 4, 'text-anchor': 'end'}, number(v)));
  for (const v of ticks(first, last, width < 300 ? 3 : width < 420 ? 5 : 6)) svg.append(el('text', {class: 'dim', x: Math.min(x(v), width - 16), y: height - 6, 'text-anchor': 'middle'}, byTime ? seconds(v) : number(v)));
  if (index === 2) svg.append(el('line', {class: 'one', x1: left, x2: width - right, y1: y(1), y2: y(1)}));
  svg.append(el('path', {class: 'band', d: `M${points(3).join('L')}L${points(2).reverse().join('L')}Z`}), el('path', {class: 'line', d: 'M' + points(4).join('L')}));
  const cross = el('line', {class: 'cross', y1: top, y2: height - bottom, visibility: 'hidden'}), said = el('output');
  svg.append(cross);
  let chosen = rows.length - 1;
  const show = (visible) => {
    const row = rows[chosen], [lowest, highest, mean] = row.slice(2 + 3 * index, 5 + 3 * index);
    cross.setAttribute('x1', x(at(row))); cross.setAttribute('x2', x(at(row))); cross.setAttribute('visibility', visible ? 'visible' : 'hidden');
    said.textContent = !visible ? '' : `step ${row[0]}: ` + number(mean) + (lowest !== highest ? ` (${number(lowest)} to ${number(highest)})` : '');
  };
  svg.addEventListener('keydown', (event) => {
    const by = {ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity}[event.key];
    if (by === undefined) return;
    event.preventDefault();
    chosen = Math.max(0, Math.min(rows.length - 1, chosen + by));
    show(true);
  });
  svg.addEventListener('pointermove', (event) => {
    const box = svg.getBoundingClientRect(), wanted = first + ((event.clientX - box.left) * width / box.width - left) / (width - left - right) * (last - first);
    chosen = rows.reduce((best, row, i) => (Math.abs(at(row) - wanted) < Math.abs(at(rows[best]) - wanted) ? i : best), 0);
    show(true);
  });
  for (const leave of ['pointerleave', 'blur']) svg.addEventListener(leave, () => { chosen = rows.length - 1; show(false); });
  show(false);
  const legend = index === 2 ? el('small', {}, ' dashed: the host alone') : null;
  return el('figure', {}, el('figcaption', {}, el('span', {}, label, legend), said), svg);
}

function curves(asked = false) {
  const body = $('curves').querySelector('.body'), active = document.activeElement;
  $('curves').hidden = !data.curves || !data.curves.rows.length;
  if ($('curves').hidden || (!asked && active && body.contains(active))) return; // someone reads values there
  const known = data.curves.labels.filter((label, i) => data.curves.rows.some((row) => row[2 + 3 * i] != null)).length;
  const columns = Math.max(1, Math.min(known, Math.floor((body.clientWidth + 16) / (compact ? 206 : 376))));
  const width = Math.max(compact ? 190 : 240, Math.floor((body.clientWidth - 16 * (columns - 1)) / columns));
  fill(body, ...data.curves.labels.map((label, i) => curve(label, i, width)));
  $('over').textContent = byTime ? 'time' : 'steps';
  $('axis').textContent = byTime ? 'show over steps' : 'show over time';
  $('curves-note').textContent = data.curves.merged ? 'The line is a mean of several steps; the band reaches from the lowest to the highest of them.' : '';
}

// -- the page -----------------------------------------------------------------------------------------

function age() {
  const passed = (name) => (performance.now() - (came[name] || 0)) / 1000;
  $('age').textContent = data.moment ? `as of ${data.moment}` : known && !data.over && data.since_step_s != null ? `last step ${seconds(data.since_step_s + passed('since_step_s'))} ago` : '';
  if (known) for (const small of document.querySelectorAll('[data-heard]')) small.textContent = `heard ${seconds(+small.dataset.heard + passed('machines'))} ago`;
}

function badge() {
  $('status').hidden = !data.status;
  $('status').textContent = (known ? '' : 'last known: ') + data.status;
  $('status').className = 'chip ' + (known && data.level || 'info');
}

function draw(changed, all = false) {
  const has = (...names) => all || names.some((name) => name in changed);
  if (has('title')) { $('title').textContent = data.title; document.title = `${data.title} · Potluck`; }
  if (has('about')) $('about').textContent = data.about || '';
  if (has('status', 'level')) badge();
  if (has('headlines')) headlines(data.headlines || []);
  if (has('machines')) fleet(data.machines || []);
  if (has('advice')) { $('advice').hidden = !(data.advice || []).length; fill($('advice').querySelector('ul'), ...(data.advice || []).map((text) => el('li', {}, el('span', {'aria-hidden': 'true'}, '→'), el('span', {}, text)))); }
  if (has('advice_from')) $('advice-from').textContent = data.advice_from || '';
  if (has('steps', 'timelines')) timeline();
  if (has('curves')) curves();
  if (has('facts', 'table')) table();
  if (has('notices')) {
    $('notices').hidden = !(data.notices || []).length;
    notices([...(data.notices || [])].reverse());
    $('more').textContent = data.more_notices ? `${data.more_notices} earlier ones are in events.jsonl.` : '';
  }
  age();
}

function update(news) {
  for (const [name, value] of Object.entries(news)) {
    came[name] = performance.now();
    if (name === 'curves' && data.curves) {
      data.curves.rows.length = Math.min(data.curves.rows.length, value.start);
      data.curves.rows.push(...value.rows);
      data.curves.merged = value.merged;
    } else if (name === 'steps' && data.steps) {
      if (value.length) data.steps = [...data.steps.filter((s) => s.step < value[0].step), ...value].slice(-24);
    } else data[name] = value;
  }
  draw(news);
}

function follow() {
  const source = new EventSource('events');
  const tell = (words) => {
    known = !words;
    $('lost').hidden = known;
    $('lost').textContent = words;
    badge();
    age();
  };
  source.onmessage = (message) => {
    try {
      update(JSON.parse(message.data));
      tell('');
    } catch {
      tell('An update could not be read. This page asks for everything again.');
      source.close();
      setTimeout(follow, 1000);
    }
    if (data.over) source.close();
  };
  source.onerror = () => { if (known) tell(`No connection to the run since ${new Date().toLocaleTimeString()}. This is the last state that was known.`); };
}

draw(data, true);
$('axis').addEventListener('click', () => { byTime = !byTime; curves(true); });
let wide = innerWidth;
addEventListener('resize', () => { if (innerWidth !== wide) { wide = innerWidth; trunks(); timeline(); curves(); } });
if (!data.over) { follow(); setInterval(age, 1000); }
