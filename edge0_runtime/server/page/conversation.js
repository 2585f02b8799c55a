// Turns and the messages that follow from them, kept while the tab lives.
//
// A turn is {user, answers}; an answer {model, text, finish, tokens, seconds, firstSecond, problem}. Two models that are compared
// answer the same turn, and each goes on from its own answers.

const KEPT = "edge0.conversation";

export class Conversation {
  constructor() {
    this.turns = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
  }

  keep() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(this.turns));
    } catch {
      sessionStorage.removeItem(KEPT); // larger than the browser allows: it lives as long as the page
    }
  }

  /** Everything from turn `index` on is forgotten, and a new turn stands there. */
  ask(index, user, models) {
    const answers = models.map((model) => ({ model, text: "", finish: null, tokens: null, seconds: null, firstSecond: null, problem: null }));
    this.turns.splice(index, Infinity, { user, answers });
    this.keep();
    return this.turns[index];
  }

  clear() {
    this.turns = [];
    this.keep();
  }

  /** What `model` is sent for turn `index`. Turns that brought no answer are left out. */
  messages(index, model, system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { user, answers } of this.turns.slice(0, index)) {
      const given = answers.find((answer) => answer.model === model) ?? answers[0];
      if (given.text === "" && given.finish === null) continue;
      messages.push({ role: "user", content: user }, { role: "assistant", content: given.text });
    }
    return [...messages, { role: "user", content: this.turns[index].user }];
  }
}
