//go:build !go1.28

#include "textflag.h"

// func Thread() uintptr
TEXT ·Thread(SB), NOSPLIT, $0-8
	MOVQ (TLS), AX
	MOVQ 48(AX), AX // g.m
	MOVQ AX, ret+0(FP)
	RET
