// Changes of a schedule that is written as rows of cells, one row for each rank: each returns new rows.

export const textOf = (rows) => rows.map((row) => `${row.join(",")}\n`).join("");

export const without = (rows, { rank, place }) =>
  rows.map((row, r) => (r === rank ? row.filter((_, k) => k !== place) : row));

// Move a cell so that it stands before the one that is at `to` now, or at the end of the row.
export function moved(rows, from, to) {
  const cell = rows[from.rank][from.place];
  const isLater = from.rank === to.rank && from.place < to.place;
  const place = isLater ? to.place - 1 : to.place;
  return without(rows, from).map((row, rank) =>
    (rank === to.rank ? [...row.slice(0, place), cell, ...row.slice(place)] : row));
}

// Cut every backward into the gradient of the input and, right behind it, those of the weights. Pairs stay.
export const cutBackwards = (rows) => rows.map((row) => row.flatMap((cell) => {
  const found = /^(\d+)B(\d+)$/.exec(cell);
  return found ? [`${found[1]}I${found[2]}`, `${found[1]}W${found[2]}`] : [cell];
}));
