"""JavaScript to query a screen's page, and for actions that mouse and keyboard cannot do."""

SETTLED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
"""Wait until the page has been drawn twice."""
REFUSE_PASTES = """addEventListener('paste', event => {
  if (!event.isTrusted) return;
  event.preventDefault();
  event.stopImmediatePropagation();
}, true)"""
"""Block pastes by Chromium itself, from keys or the middle button: all chains share its clipboards."""
OPTIONS_AT = """([x, y]) => {
  const found = document.elementFromPoint(x, y);
  if (!(found instanceof HTMLSelectElement) || found.disabled) return null;
  found.focus();
  return [...found.options].slice(0, 50).map(option => option.label.slice(0, 100));
}"""
"""Focus the <select> at a point and return its first 50 entries; null if there is none. A screenshot cannot show its
menu, which is a separate window."""
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
"""Choose an entry of the focused <select> by name; false if there is no such entry, null if no <select> is focused."""
SELECTED = """() => {
  const field = document.activeElement;
  const isField = field instanceof HTMLTextAreaElement || field instanceof HTMLInputElement;
  if (!isField || field.selectionStart === null) return String(getSelection());
  return field.type === 'password' ? '' : field.value.slice(field.selectionStart, field.selectionEnd);
}"""
"""The selected text; empty in a password field."""
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
"""Width and height in CSS pixels of the area that a wheel scrolls at a point: an element, or the whole page."""
