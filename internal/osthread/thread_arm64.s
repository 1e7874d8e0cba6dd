//go:build !go1.28

#include "textflag.h"

// func Thread() uintptr
TEXT ·Thread(SB), NOSPLIT, $0-8
	MOVD 48(g), R0 // g.m
	MOVD R0, ret+0(FP)
	RET
