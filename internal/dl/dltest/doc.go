// Package dltest helps to test packages that call C through package dl: it
// compiles small C libraries, records the words that arrive in C, and checks
// prototypes, constants and layouts against installed headers. What needs a
// compiler or a header skips, saying so, where there is none.
package dltest
