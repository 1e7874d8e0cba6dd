//go:build !race

package differ

// defaultPrograms is how many programs the test runs if no flag says so.
const defaultPrograms = 10000
