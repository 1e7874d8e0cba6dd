//go:build !race

package rng_test

const stride = 1
