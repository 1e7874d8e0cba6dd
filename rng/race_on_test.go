//go:build race

package rng_test

// stride is how many recordings apart those are that are played: the race detector
// makes each eight times as long, and finds no more in the others.
const stride = 4
