"use strict";
(function () {
  var table = document.getElementById("results");
  var state = {};
  var place = "rayhive:" + location.pathname;
  try { state = JSON.parse(sessionStorage.getItem(place)) || {}; } catch (error) { state = {}; }
  function keep(name, value) {
    state[name] = value;
    try { sessionStorage.setItem(place, JSON.stringify(state)); } catch (error) { /* private window */ }
  }

  function sortBy(number, descending) {
    var head = table.tHead.rows[0].cells[number];
    var numeric = head.dataset.numeric === "yes";
    var rows = Array.prototype.slice.call(table.tBodies[0].rows);
    rows.sort(function (a, b) {
      var x = a.cells[number].dataset.value, y = b.cells[number].dataset.value;
      if (x === "" || y === "") { return (x === "" ? 1 : 0) - (y === "" ? 1 : 0); }
      var order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
      return descending ? -order : order;
    });
    rows.forEach(function (row) { table.tBodies[0].appendChild(row); });
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (cell) { cell.removeAttribute("aria-sort"); });
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    keep("sort", [number, descending]);
  }

  function show() {
    var words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    var count = 0, rows = table.tBodies[0].rows;
    Array.prototype.forEach.call(rows, function (row) {
      var text = row.textContent.toLowerCase();
      var shown = words.every(function (word) { return text.indexOf(word) >= 0; });
      shown = shown && (!front.checked || row.dataset.front === "yes");
      row.hidden = !shown;
      count += shown ? 1 : 0;
    });
    table.classList.toggle("all", all.checked);
    document.getElementById("shown").textContent = count + " of " + rows.length + " rows";
    keep("filter", filter.value);
    keep("front", front.checked);
    keep("all", all.checked);
  }

  if (table) {
    var filter = document.getElementById("filter");
    var front = document.getElementById("front-only");
    var all = document.getElementById("all-columns");
    filter.value = state.filter || "";
    front.checked = Boolean(state.front);
    all.checked = Boolean(state.all);
    [filter, front, all].forEach(function (input) { input.addEventListener("input", show); });
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (cell, number) {
      cell.querySelector("button").addEventListener("click", function () {
        sortBy(number, cell.getAttribute("aria-sort") === "ascending");
      });
    });
    if (state.sort && table.tHead.rows[0].cells[state.sort[0]]) { sortBy(state.sort[0], state.sort[1]); }
    show();
  }

  var reload = document.getElementById("reload");
  if (reload && document.body.dataset.reload) {
    setInterval(function () {
      if (reload.checked && !document.hidden) { location.reload(); }
    }, 1000 * Number(document.body.dataset.reload));
  }
})();
