// Pages that are broken in one way each, and what check.mjs must say of them: a check that cannot fail proves nothing.
// `make site-check` tries this first.
//
//     node broken.mjs FOLDER_OF_PLAYWRIGHT CHROMIUM

import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const [packages, chromium] = process.argv.slice(2);
const folder = mkdtempSync(join(tmpdir(), "minipar-broken-"));

const IMAGE = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"; // one pixel
const HEAD = `<!doctype html><html data-theme="light"><head><link rel="icon" href="data:,"><style>
  html { background: white; }
  html[data-theme="dark"] { background: #121212; color: white; }
  .bar { overflow-x: auto; }
  ::-webkit-scrollbar { height: 10px; }
</style></head><body><article>`;
const LINE = "x".repeat(900);
const CELLS = "<td>a cell of a table</td>".repeat(40);
const explorer = (problem) => `<div id="one"><form class="explorer-form"><label>n
  <input type="number" name="n" value="1"></label></form><p class="explorer-problem">${problem}</p>
  <div class="explorer-result"><svg></svg></div></div>`;
const ACTS = `<script>document.querySelector("form").addEventListener("input", ({ target }) => {
  document.querySelector(".explorer-result").innerHTML = "<svg></svg>" + target.value; });</script>`;
const svg = (inside) => `<svg class="map" aria-label="a map" width="200" height="50">${inside}</svg>`;

// {name of a page: [its body, what is said of it]}; of a right page nothing is said.
const PAGES = {
  right: [`<pre class="bar">${LINE}</pre><img src="a.gif?" alt="A pixel that is black">`, ""],
  short_words: ['<img src="a.gif?" alt="a pixel">', '"a pixel" does not say what it shows'],
  hash: ['<img src="a.gif?" alt="../_images/1234.png of a file">', "does not say what it shows"],
  missing: ['<img src="no.gif?" alt="A picture that is missing">', "404"],
  cut_code: [`<pre style="overflow: hidden">${LINE}</pre>`, "1400 px, light: pre is cut"],
  cut_on_phones: [`<pre style="overflow: hidden">${LINE.slice(0, 80)}</pre>`, "390 px, dark: pre is cut"],
  cut_table: [`<div style="overflow-x: hidden"><table><tr>${CELLS}</tr></table></div>`, "table is cut"],
  hidden_bar: [`<div class="bar" style="scrollbar-width: none"><table><tr>${CELLS}</tr></table></div>`, "table is cut"],
  wide: ['<div style="width: 1600px">wide</div>', "the page is 16"],
  pale: [svg('<rect width="20" height="20" fill="#DDDDDD"/>'), "1400 px, light: rect"],
  pale_in_the_dark: [svg('<rect width="20" height="20" fill="#222223"/>'), "390 px, dark: rect"],
  pale_text: [svg(`<rect width="90" height="30" fill="#E69F00" stroke="black"/>
    <text x="5" y="20" fill="white">no</text>`), 'text "no" on rgb(230, 159, 0)'],
  formula: ["<p>so $a + b$ is</p>", "raw TeX"],
  engine: ['<pre class="bar">[stdout:0] hello</pre>', "an engine's mark"],
  host: ['<img src="http://example.com/a.png" alt="A picture of another host">', "asks another host"],
  error: ['<script>throw new Error("broken")</script>', "error: broken"],
  heavy: ['<script src="heavy.js"></script>', "loads 2.60 MB"],
  animation: ['<img src="a.gif" alt="An animation without a button">', "no button stops the animation"],
  idle_control: [explorer("impossible"), "one: n does nothing"],
  accepting: [explorer("") + ACTS, "one accepts n = -1"],
  idle_button: [`<div class="player" id="player">${svg("")}<button>step</button></div>`, "step does nothing"],
};

for (const [name, [body]] of Object.entries(PAGES)) {
  writeFileSync(join(folder, `${name}.html`), `${HEAD}${body}</article></body></html>`);
}
writeFileSync(join(folder, "a.gif"), Buffer.from(IMAGE, "base64"));
writeFileSync(join(folder, "heavy.js"), `//${"x".repeat(2.6e6)}`);
const check = join(dirname(fileURLToPath(import.meta.url)), "check.mjs");
const env = { ...process.env, PAGES: "" };
const { stdout, stderr } = spawnSync("node", [check, folder, packages, chromium], { encoding: "utf8", env });
rmSync(folder, { recursive: true });

const parts = stdout.split(/^(?=FAIL |ok   )/m);
const said = Object.fromEntries(parts.map((part) => [/^\w+ +(\w+)\.html/.exec(part)?.[1], part]));
const unseen = Object.entries(PAGES).filter(([name, [, words]]) =>
  (words ? !said[name]?.startsWith("FAIL") || !said[name].includes(words) : !said[name]?.startsWith("ok")));
for (const [name] of unseen) console.log(`the check misjudges ${name}: ${said[name] ?? stderr}`);
const all = Object.keys(PAGES).length;
console.log(`the check itself: ${all - unseen.length} of ${all} broken pages are judged as they should`);
process.exit(unseen.length ? 1 : 0);
