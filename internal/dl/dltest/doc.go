// Package dltest helps to test packages that call C through package dl: it compiles small
// C libraries, records the words that C receives, and checks prototypes, constants and
// layouts against installed headers. A test that needs a compiler or a header is skipped,
// with a message, if it is missing.
package dltest
