#!/bin/bash
cat > /app/leap <<'PROGRAM'
#!/bin/sh
if [ $(($1 % 400)) -eq 0 ] || { [ $(($1 % 4)) -eq 0 ] && [ $(($1 % 100)) -ne 0 ]; }; then echo leap; else echo common; fi
PROGRAM
chmod +x /app/leap
