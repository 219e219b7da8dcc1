#!/bin/bash
for number in $(seq 10); do echo $((number * number)); done > /app/squares.txt
