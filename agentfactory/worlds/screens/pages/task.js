// Begins a page's task from a seed, and keeps its state. A page calls `task.page(build)`; `build(random)` makes the page
// and returns the instruction, and `task.finish(right)` ends the task.
const task = {
  state: {done: false, score: 0},
  page(build) { this.build = build; },
  begin(seed) {
    const random = task.generator(seed);
    random();  // the first numbers of neighbouring seeds are correlated
    const pick = (list) => list[Math.floor(random() * list.length)];
    const whole = (from, to) => from + Math.floor(random() * (to - from + 1));
    const shuffled = (list) => {
      const rest = [...list], drawn = [];
      while (rest.length) drawn.push(rest.splice(Math.floor(random() * rest.length), 1)[0]);
      return drawn;
    };
    return this.build({pick, whole, shuffled});
  },
  finish(right) {
    if (!this.state.done) this.state = {done: true, score: right ? 1 : 0};
  },
  // mulberry32
  generator(seed) {
    let state = (seed * 2654435761) >>> 0;
    return () => {
      state = (state + 0x6D2B79F5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  },
};

// An element below `parent`: make('button', {id: 'x', onclick: f}, 'text', parent).
function make(name, properties = {}, text = '', parent = document.body) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties))
    if (key === 'style') Object.assign(element.style, value);
    else element[key] = value;
  if (text !== '') element.textContent = text;
  parent.append(element);
  return element;
}

const NAMES = ['Ada', 'Bruno', 'Chen', 'Dana', 'Emil', 'Fatima', 'Goran', 'Hanna', 'Ivan', 'Jun', 'Kira', 'Luis'];
const WORDS = ['apple', 'bridge', 'candle', 'desert', 'engine', 'forest', 'garden', 'harbor', 'island', 'jacket', 'kettle',
  'ladder', 'marble', 'needle', 'orange', 'pencil'];
const CITIES = ['Athens', 'Berlin', 'Cairo', 'Dakar', 'Lima', 'Oslo', 'Paris', 'Quito', 'Rome', 'Tokyo'];
const COLOURS = ['red', 'green', 'blue', 'yellow', 'purple', 'orange'];
