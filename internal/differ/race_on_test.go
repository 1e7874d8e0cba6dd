//go:build race

package differ

// defaultPrograms is how many programs the test runs if no flag says so. With the
// race detector each takes five times as long.
const defaultPrograms = 1000
