// Open every page of the site in Chromium without a network, and fail on anything that a reader would see broken:
// errors on the console, requests to other hosts, files that are missing, pictures that do not load, formulas that are
// not rendered, explorers that do not react, a search that finds nothing. Run by `make site-check`.
//
//     node check.mjs SITE FOLDER_OF_PLAYWRIGHT CHROMIUM [SCREENSHOTS]

import { mkdirSync, readFileSync, readdirSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { extname, join, resolve } from "node:path";

const [site, packages, executablePath, screenshots] = process.argv.slice(2);
const { chromium } = createRequire(resolve(packages, "index.js"))("playwright-core");

const TYPES = {
  ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json",
  ".svg": "image/svg+xml", ".png": "image/png", ".gif": "image/gif", ".woff": "font/woff", ".woff2": "font/woff2",
};
const server = createServer((request, response) => {
  const path = decodeURIComponent(new URL(request.url, "http://site").pathname);
  try {
    const body = readFileSync(join(site, path));
    response.writeHead(200, { "content-type": TYPES[extname(path)] ?? "application/octet-stream" }).end(body);
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
const home = `http://127.0.0.1:${server.address().port}/`;

// ---- one page -------------------------------------------------------------------------------------------------------

// What is wrong with the page that is open, by its own content.
function faults() {
  const found = [];
  for (const image of document.querySelectorAll("img")) {
    if (!image.complete || !image.naturalWidth) found.push(`picture ${image.src} does not load`);
  }
  const errors = document.querySelectorAll("mjx-merror, .math:not(:has(mjx-container))");
  for (const formula of errors) found.push(`formula not rendered: ${formula.textContent.slice(0, 80)}`);
  // Text outside of code with $...$ or TeX commands is a formula that was not recognized.
  const walker = document.createTreeWalker(document.querySelector("article") ?? document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const { data, parentElement } = walker.currentNode;
    if (parentElement.closest("pre, code, script, style, mjx-container")) continue;
    if (/\$[^$\n]+\$|\\(frac|sum|cdot|times|left|begin|text)\b/.test(data)) {
      found.push(`raw TeX: ${data.trim().slice(0, 80)}`);
    }
  }
  return found;
}

// Wait for the pictures, also for those below the fold, and for the formulas.
async function settled(page) {
  await page.evaluate(async () => {
    const pictures = [...document.querySelectorAll("img")];
    for (const picture of pictures) picture.loading = "eager";
    await Promise.allSettled(pictures.map((picture) => picture.decode()));
    await window.MathJax?.startup?.promise;
  });
}

// ---- explorers and search -------------------------------------------------------------------------------------------

async function explorerFaults(page) {
  const found = [];
  for (const [id, field, change] of [["schedule", "m", "12"], ["memory", "d", "7"], ["layout", "dp", "5"]]) {
    const result = page.locator(`#${id}-explorer .explorer-result`);
    const input = page.locator(`#${id}-explorer [name=${field}]`);
    const before = await result.innerHTML();
    if (!before.includes("<svg")) found.push(`the ${id} explorer draws nothing`);
    await input.fill(change);
    if ((await result.innerHTML()) === before) found.push(`the ${id} explorer does not react to ${field} = ${change}`);
    await input.fill("-1");
    if (!(await result.locator(".explorer-error").count())) found.push(`the ${id} explorer accepts ${field} = -1`);
    await input.fill(change);
  }
  return found;
}

const SEARCHES = ["microbatch", "all_reduce"];

async function searchFaults(page) {
  const found = [];
  for (const word of SEARCHES) {
    await page.goto(`${home}search.html?q=${word}`);
    await page.locator("#search-results li").first().waitFor({ timeout: 20000 })
      .catch(() => found.push(`the search for ${word} finds nothing`));
  }
  return found;
}

// ---- all pages ------------------------------------------------------------------------------------------------------

const browser = await chromium.launch({
  executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"],
});
const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
const page = await context.newPage();
let problems = [];
await context.route((url) => !url.href.startsWith(home), (route) => {
  problems.push(`asks another host: ${route.request().url()}`);
  route.abort();
});
page.on("console", (message) => message.type() === "error" && problems.push(`console: ${message.text()}`));
page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
page.on("response", (reply) => reply.status() >= 400 && problems.push(`${reply.status()}: ${reply.url()}`));

const pages = readdirSync(site, { recursive: true }).filter((path) => path.endsWith(".html") && !path.startsWith("_"));
let failed = 0;
for (const path of pages.sort()) {
  problems = [];
  await page.goto(home + path);
  if (path === "index.html") await page.waitForURL(`${home}README.html`); // it only leads there
  await settled(page);
  problems.push(...(await page.evaluate(faults)));
  if (path.endsWith("site/explorers.html")) problems.push(...(await explorerFaults(page)));
  if (screenshots) {
    mkdirSync(screenshots, { recursive: true });
    const file = join(screenshots, `${path.replaceAll("/", "_")}.png`);
    await page.screenshot({ path: file, fullPage: true, timeout: 120000 });
  }
  if (path === "search.html") problems.push(...(await searchFaults(page)));
  const formulas = await page.locator("mjx-container").count();
  const pictures = await page.locator("img").count();
  console.log(`${problems.length ? "FAIL" : "ok  "} ${path}: ${formulas} formulas, ${pictures} pictures`);
  for (const problem of problems) console.log(`     ${problem}`);
  failed += problems.length > 0;
}
await browser.close();
server.close();
console.log(failed ? `${failed} of ${pages.length} pages fail` : `${pages.length} pages, no problem`);
process.exit(failed ? 1 : 0);
