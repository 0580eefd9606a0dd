// How the search orders pages.  Sphinx gives a heading that is the query no more points than a page with one of its
// words in any heading, and orders these by the alphabet, so that pages for contributors came first.
var Scorer = {
  score: ([page, , , , score, , kind]) =>
    score + (kind === "title" ? 10 : 0) - (page.startsWith("contributing/") ? 10 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
