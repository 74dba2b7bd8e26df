// What the page's scripts use of elements that they find by a selector, whose class TypeScript cannot know.

interface Element {
  readonly dataset: DOMStringMap;
  focus(options?: FocusOptions): void;
}
