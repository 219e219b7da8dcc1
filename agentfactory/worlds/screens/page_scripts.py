"""JavaScript by which a screen asks its page, and does what a mouse and keys cannot."""

SETTLED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
"""Waits until the page has been drawn twice."""
REFUSE_PASTES = """addEventListener('paste', event => {
  if (!event.isTrusted) return;
  event.preventDefault();
  event.stopImmediatePropagation();
}, true)"""
"""Refuses what Chromium itself pastes, by keys or the middle button: its clipboards are those of all chains."""
OPTIONS_AT = """([x, y]) => {
  const found = document.elementFromPoint(x, y);
  if (!(found instanceof HTMLSelectElement) || found.disabled) return null;
  found.focus();
  return [...found.options].slice(0, 50).map(option => option.label.slice(0, 100));
}"""
"""Focuses the <select> at a place; its first entries, or null. No screenshot shows its menu, a window of its own."""
CHOOSE = """(text) => {
  const menu = document.activeElement;
  if (!(menu instanceof HTMLSelectElement)) return null;
  const wanted = text.trim().toLowerCase();
  const labels = [...menu.options].map(option => option.label.trim().toLowerCase());
  const index = labels.includes(wanted) ? labels.indexOf(wanted) : labels.findIndex(label => label.startsWith(wanted));
  if (index < 0) return false;
  menu.selectedIndex = index;
  for (const kind of ['input', 'change']) menu.dispatchEvent(new Event(kind, {bubbles: true}));
  return true;
}"""
"""Chooses from the focused <select> by name; false if it has no such entry, null if none is focused."""
SELECTED = """() => {
  const field = document.activeElement;
  const isField = field instanceof HTMLTextAreaElement || field instanceof HTMLInputElement;
  if (!isField || field.selectionStart === null) return String(getSelection());
  return field.type === 'password' ? '' : field.value.slice(field.selectionStart, field.selectionEnd);
}"""
"""The text that is selected."""
SCROLLS_AT = """([x, y, across]) => {
  let found = document.elementFromPoint(x, y);
  for (; found && found !== document.body && found !== document.documentElement; found = found.parentElement) {
    if (found instanceof HTMLIFrameElement) break;
    const style = getComputedStyle(found), way = across ? style.overflowX : style.overflowY;
    const more = across ? found.scrollWidth > found.clientWidth : found.scrollHeight > found.clientHeight;
    if (more && (way === 'auto' || way === 'scroll')) break;
  }
  if (!found || found === document.body || found === document.documentElement) return [innerWidth, innerHeight];
  return [Math.min(found.clientWidth, innerWidth), Math.min(found.clientHeight, innerHeight)];
}"""
"""Width and height in CSS pixels of what a wheel scrolls at a place: a part of the page, or all of it."""
