// Three heat maps, layers x experts: what ran, what was predicted, what was read. A step's count fades as others follow.

import { byId } from "./dom.js";
import { figures } from "./format.js";

const KINDS = ["ran", "predicted", "read"];
const HALF_LIFE = 32; // steps

export class HeatMaps {
  constructor({ layers, experts }) {
    this.layers = layers;
    this.experts = experts;
    this.predicted = new Set(); // layers that the model which ran last routes a token ahead
    this.counts = KINDS.map(() => new Float64Array(layers.length * experts)); // fading
    this.sums = KINDS.map(() => new Float64Array(layers.length)); // since the page looks, by layer
    this.used = layers.map(() => new Set());
    this.canvases = KINDS.map((kind) => byId(`map-${kind}`));
    this.chosen = null;
    for (const canvas of this.canvases) {
      canvas.width = experts;
      canvas.height = layers.length;
      canvas.style.height = `${Math.max(64, layers.length * 3)}px`;
      canvas.onpointermove = (event) => this.point(event);
    }
    byId("maps").onkeydown = (event) => this.move(event);
    matchMedia("(prefers-color-scheme: dark)").onchange = () => this.draw();
    this.draw();
  }

  /** Take an event's cells, [row, expert, ran, predicted, read], of so many steps; `predicted`: layers routed a token ahead. */
  add(cells, steps, predicted) {
    this.predicted = new Set(predicted);
    const fade = 0.5 ** (steps / HALF_LIFE);
    for (const counts of this.counts) for (let at = 0; at < counts.length; at += 1) counts[at] *= fade;
    for (const [row, expert, ...numbers] of cells) {
      numbers.forEach((number, kind) => {
        this.counts[kind][row * this.experts + expert] += number;
        this.sums[kind][row] += number;
      });
      if (numbers[0]) this.used[row].add(expert);
    }
    this.draw();
  }

  draw() {
    this.canvases.forEach((canvas, kind) => {
      const [red, green, blue] = colour(KINDS[kind]);
      const counts = this.counts[kind];
      const most = counts.reduce((a, b) => Math.max(a, b), 1e-9);
      const image = new ImageData(canvas.width, canvas.height);
      counts.forEach((count, at) => image.data.set([red, green, blue, 255 * Math.sqrt(count / most)], 4 * at));
      canvas.getContext("2d").putImageData(image, 0, 0);
      const sum = this.sums[kind].reduce((a, b) => a + b, 0);
      canvas.setAttribute("aria-label", `${KINDS[kind]}: ${figures(sum)} experts in ${this.layers.length} layers; by layer in the table below`);
    });
  }

  /** Rows of the table by layer. */
  rows() {
    return this.layers.map((layer, row) => [
      layer,
      this.predicted.has(layer) ? "prerouter" : "own gate",
      `${figures(this.sums[0][row])} (${this.used[row].size} of ${this.experts})`,
      figures(this.sums[1][row]),
      figures(this.sums[2][row]),
    ]);
  }

  point(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const expert = Math.floor(((event.clientX - box.left) / box.width) * this.experts);
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.layers.length);
    this.choose(row, expert);
  }

  move(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!steps) return;
    event.preventDefault();
    const [row, expert] = this.chosen ?? [0, -1];
    this.choose(row + steps[0], expert + steps[1]);
  }

  choose(row, expert) {
    row = Math.max(0, Math.min(this.layers.length - 1, row));
    expert = Math.max(0, Math.min(this.experts - 1, expert));
    this.chosen = [row, expert];
    const numbers = KINDS.map((kind, at) => `${kind} ${figures(this.counts[at][row * this.experts + expert])}`);
    byId("cell").textContent = `Layer ${this.layers[row]}, expert ${expert}: ${numbers.join(", ")} (recent steps count more)`;
  }
}

function colour(kind) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(`--${kind}`).trim();
  return [1, 3, 5].map((at) => Number.parseInt(value.slice(at, at + 2), 16)); // #rrggbb
}
