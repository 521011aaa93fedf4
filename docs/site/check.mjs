// Open every page of the site in Chromium without a network, and fail on anything that a reader would see broken:
// errors on the console, requests to other hosts, files that are missing, pictures that do not load or have no sentence
// that describes them, formulas that are not rendered, code and tables that are cut on a wide or on a narrow screen,
// marks that can hardly be seen in light or in dark, controls that do nothing, a search that finds nothing, pages that
// are too heavy. Run by `make site-check`.
//
//     node check.mjs SITE FOLDER_OF_PLAYWRIGHT CHROMIUM [SCREENSHOTS]

import { mkdirSync, readFileSync, readdirSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { extname, join, resolve } from "node:path";
import { animationFaults, buttonFaults, contentFaults, contrastFaults } from "./checks.mjs";
import { controlFaults, cutFaults, traceFaults } from "./checks.mjs";

const [site, packages, executablePath, screenshots] = process.argv.slice(2);
const { chromium } = createRequire(resolve(packages, "index.js"))("playwright-core");

let problems = [];
let weight = 0; // bytes served since the page was opened

const TYPES = {
  ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json",
  ".svg": "image/svg+xml", ".png": "image/png", ".gif": "image/gif", ".woff": "font/woff", ".woff2": "font/woff2",
};
const server = createServer((request, response) => {
  const path = decodeURIComponent(new URL(request.url, "http://site").pathname);
  try {
    const body = readFileSync(join(site, path));
    weight += body.length;
    response.writeHead(200, { "content-type": TYPES[extname(path)] ?? "application/octet-stream" }).end(body);
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
const home = `http://127.0.0.1:${server.address().port}/`;

const WIDTHS = [1400, 390];
const THEMES = ["light", "dark"];
const MOST_BYTES = 2.5e6; // of a page with all that it loads
const PATIENCE = 180000; // milliseconds; on a busy machine a page can take a minute

// ---- one page -------------------------------------------------------------------------------------------------------

// Open what is folded, and wait for the pictures, also for those below the fold, and for the formulas.
async function settled(page) {
  await page.evaluate(async () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    const pictures = [...document.querySelectorAll("img")];
    for (const picture of pictures) picture.loading = "eager";
    await Promise.allSettled(pictures.map((picture) => picture.decode()));
    await window.MathJax?.startup?.promise;
  });
}

async function faultsInAllLooks(page) {
  const found = await page.evaluate(contentFaults);
  for (const theme of THEMES) {
    await page.evaluate((name) => { document.documentElement.dataset.theme = name; }, theme);
    for (const width of WIDTHS) {
      await page.setViewportSize({ width, height: 900 });
      const faults = [...(await page.evaluate(cutFaults)), ...(await page.evaluate(contrastFaults))];
      found.push(...faults.map((fault) => `${width} px, ${theme}: ${fault}`));
    }
  }
  await page.setViewportSize({ width: WIDTHS[0], height: 900 });
  await page.evaluate(() => { document.documentElement.dataset.theme = "light"; });
  return found;
}

// A picture of the page in each look, in the folder of screenshots.
async function photograph(page, path) {
  mkdirSync(screenshots, { recursive: true });
  for (const theme of THEMES) {
    await page.evaluate((name) => { document.documentElement.dataset.theme = name; }, theme);
    for (const width of WIDTHS) {
      await page.setViewportSize({ width, height: 900 });
      const file = join(screenshots, `${path.replaceAll("/", "_")}.${width}.${theme}.jpg`);
      await page.screenshot({ path: file, fullPage: true, quality: 70, timeout: PATIENCE });
    }
  }
}

// ---- search ---------------------------------------------------------------------------------------------------------

const SEARCHES = ["microbatch", "all_reduce"];

async function searchFaults(page) {
  const found = [];
  for (const word of SEARCHES) {
    await page.goto(`${home}search.html?q=${word}`);
    await page.locator("#search-results li").first().waitFor()
      .catch(() => found.push(`the search for ${word} finds nothing`));
    await page.locator("#search-results p.context").first().waitFor();
    const excerpts = await page.locator("#search-results p.context").allTextContents();
    const menus = excerpts.filter((excerpt) => /System Settings|Light Dark/.test(excerpt));
    if (menus.length) found.push(`the search for ${word} shows menus: ${menus[0].trim().slice(0, 60)}`);
  }
  return found;
}

// ---- touch ----------------------------------------------------------------------------------------------------------

// What a finger cannot do in the schedule editor: choose an action by a tap, and drag it to the front of its row.
async function touchFaults(context, page) {
  const chips = page.locator('.chip-row[data-rank="0"] .chip');
  if ((await chips.count()) < 3) return [];
  await page.setViewportSize({ width: WIDTHS[1], height: 900 });
  const session = await context.newCDPSession(page);
  await session.send("Emulation.setTouchEmulationEnabled", { enabled: true });
  const touch = (type, touchPoints) => session.send("Input.dispatchTouchEvent", { type, touchPoints });
  const middle = async (chip) => {
    const { x, y, width, height } = await chip.boundingBox();
    return { x: x + width / 2, y: y + height / 2, width };
  };
  const moved = chips.nth(2);
  await moved.scrollIntoViewIfNeeded();
  const words = await moved.textContent();
  const start = await middle(moved);
  await touch("touchStart", [start]);
  await touch("touchEnd", []);
  await page.locator('.chip[aria-pressed="true"]').waitFor({ timeout: 5000 }).catch(() => {});
  const goal = await middle(chips.first());
  await touch("touchStart", [start]);
  for (const share of [0.3, 0.6, 1]) {
    await touch("touchMove", [{ x: start.x + share * (goal.x - goal.width / 3 - start.x), y: goal.y }]);
  }
  await touch("touchEnd", []);
  const first = await chips.first().textContent();
  await session.send("Emulation.setTouchEmulationEnabled", { enabled: false });
  await page.setViewportSize({ width: WIDTHS[0], height: 900 });
  return first === words ? [] : [`a finger drags ${words} to the front of its row, but there is ${first}`];
}

// ---- all pages ------------------------------------------------------------------------------------------------------

const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"],
  ignoreDefaultArgs: ["--hide-scrollbars"],
});

async function openContext() {
  const context = await browser.newContext({ viewport: { width: WIDTHS[0], height: 900 } });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  await context.route((url) => !url.href.startsWith(home), (route) => {
    problems.push(`asks another host: ${route.request().url()}`);
    route.abort();
  });
  page.on("console", (message) => message.type() === "error" && problems.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => problems.push(`error: ${error.message}`));
  page.on("response", (reply) => reply.status() >= 400 && problems.push(`${reply.status()}: ${reply.url()}`));
  return { context, page };
}

const all = readdirSync(site, { recursive: true }).filter((path) => path.endsWith(".html") && !path.startsWith("_"));
const only = process.env.PAGES ? new RegExp(process.env.PAGES) : /./;
const pages = all.filter((path) => only.test(path)).sort();
let failed = 0;
for (const path of pages) {
  const { context, page } = await openContext(); // with an empty cache, so that a page's weight is all that it loads
  problems = [];
  weight = 0;
  await page.goto(home + path);
  if (path === "index.html") await page.waitForURL(`${home}docs/site/start.html`); // it only leads there
  await settled(page);
  if (weight > MOST_BYTES) problems.push(`loads ${(weight / 1e6).toFixed(2)} MB, more than ${MOST_BYTES / 1e6}`);
  const loaded = weight;
  if (screenshots) await photograph(page, path); // before the controls are tried
  problems.push(...(await faultsInAllLooks(page)));
  problems.push(...(await page.evaluate(controlFaults)), ...(await page.evaluate(buttonFaults)));
  problems.push(...(await page.evaluate(traceFaults)), ...(await page.evaluate(animationFaults)));
  problems.push(...(await touchFaults(context, page)));
  if (path === "search.html") problems.push(...(await searchFaults(page)));
  const formulas = await page.locator("mjx-container").count();
  const pictures = await page.locator("img").count();
  const summary = `${formulas} formulas, ${pictures} pictures, ${(loaded / 1e6).toFixed(2)} MB`;
  console.log(`${problems.length ? "FAIL" : "ok  "} ${path}: ${summary}`);
  for (const problem of problems) console.log(`     ${problem}`);
  failed += problems.length > 0;
  await context.close();
}
await browser.close();
server.close();
console.log(failed ? `${failed} of ${pages.length} pages fail` : `${pages.length} pages, no problem`);
process.exit(failed ? 1 : 0);
