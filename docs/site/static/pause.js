// A button under each animation that stops it and lets it run again. Where the reader's system asks for less motion, an
// animation stands still from the start.

// A picture of the frame that is shown now, of the same size as the animation.
function frameOf(image, still) {
  still.width = image.naturalWidth;
  still.height = image.naturalHeight;
  still.getContext("2d").drawImage(image, 0, 0);
}

function addButton(image) {
  const still = document.createElement("canvas");
  still.className = "animation-still";
  still.setAttribute("role", "img");
  still.setAttribute("aria-label", image.alt);
  still.hidden = true;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "animation-button";
  const show = (isRunning) => {
    if (!isRunning) frameOf(image, still);
    still.hidden = isRunning;
    image.hidden = !isRunning;
    button.textContent = isRunning ? "stop" : "play";
    button.setAttribute("aria-label", `${button.textContent} the animation: ${image.alt}`);
  };
  button.addEventListener("click", () => show(image.hidden));
  image.after(still, document.createElement("br"), button);
  show(!window.matchMedia("(prefers-reduced-motion: reduce)").matches);
}

for (const image of document.querySelectorAll('article img[src$=".gif"]')) {
  const add = () => addButton(image);
  if (image.complete) add();
  else image.addEventListener("load", add, { once: true });
}
